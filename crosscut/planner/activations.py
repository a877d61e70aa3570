"""Activations that one layer keeps from forward to backward pass, in bytes on one rank, beside published formulas.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4 and Table 2) count, for elements of two bytes and dropout masks of
one, on `t` tensor ranks:

    no parallelism                         s b h (34 + 5 a s / h)
    tensor                                 s b h (10 + 24 / t + 5 a s / (h t))
    tensor and sequence                    s b h / t (34 + 5 a s / h)
    ... with the attention core recomputed the same without the term 5 a s / h
    whole layers recomputed                2 s b h, split by t where the sequence is

What Crosscut keeps differs in three ways. Attention runs in a fused kernel that keeps one number per query and head in
place of the scores (5 a s / h), so that recomputing it saves little (but for float64 on GPUs, which no such kernel
takes: its scores are not counted). Dropout of probability zero keeps no mask. And weights that are multiplied in a
narrower type than they are held in are kept in it for the backward pass (counted apart: it does not grow with the
batch).

Legend: `s` tokens of a sequence, `b` sequences of a micro-batch, `h` hidden size, `a` heads, `t` tensor ranks.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from crosscut.config import Layout, ModelConfig
from crosscut.config.conventions import AMPERE, takes_shared_heads
from crosscut.config.precision import precision_on
from crosscut.planner.candidate import Planned
from crosscut.planner.parameters import layer_tensors

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes that one layer keeps on one rank for the backward pass of one micro-batch, by what they are."""

    inputs: int = 0
    """Inputs of the layer and of its second half: the residual stream, as the layer norms take it."""

    norms: int = 0
    """Outputs of the layer norms, as the products for attention and MLP take them, with means and deviations."""

    attention: int = 0
    """Queries, keys and values, and the output of attention."""

    core: int = 0
    """Results that the attention core keeps beside inputs and output: a number per query and head, or the scores."""

    mlp: int = 0
    """Activations between the two matrices of the MLP, before and after GeLU."""

    masks: int = 0
    """Masks of dropout on the residual stream."""

    weights: int = 0
    """The layer's weights in the type of its products, where they are held in another one."""

    @property
    def total(self) -> int:
        """Bytes of all fields but the weights: the part that grows with the batch."""
        return self.inputs + self.norms + self.attention + self.core + self.mlp + self.masks


def layer_activations(
    run: Planned, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE, mode: str | None = None
) -> LayerActivations:
    """Bytes that a layer keeps on `device` under `training.recompute`; inputs offloaded from a GPU do not count.

    `mode` replaces `training.recompute`: `none` gives the bytes that a recomputed layer holds in its backward pass.

    On CUDA a dropout mask takes one byte per element, and attention runs in a fused kernel, which on a GPU of this
    compute `capability` may ask for keys and values once for each head of queries. On the CPU PyTorch keeps masks in
    the activations' type and, where attention has dropout, the scores.
    """
    run = run.settled(precision_on(device))
    mode = mode or run.training.recompute
    size = run.training.numbers.compute_bytes
    tensor, h = run.layout.tensor, run.model.hidden_size
    tokens = run.micro_batch_size * run.training.sequence_length
    own_tokens = tokens // tensor if run.layout.sequence_parallel else tokens  # between the parallel regions
    if mode == "full":
        offloaded = "activations" in run.training.offload and device == "cuda"
        return LayerActivations(inputs=0 if offloaded else own_tokens * h * size)
    keeps_cheap = mode != "operators"
    forgets_core = mode == "selective" and not _is_compiled(run, device)  # a compiled layer keeps what its kernel does
    repeats_keys = device == "cuda" and not forgets_core and _repeats_keys(run, capability)
    mask_bytes = 1 if device == "cuda" else size
    num_expansions = 2 if run.model.mlp == "swiglu" else 1
    return LayerActivations(
        inputs=2 * own_tokens * h * size,
        norms=2 * own_tokens * (h * size * keeps_cheap + _statistics_bytes(run.model, size, device))
        + tokens * _head_statistics_bytes(run, size),
        attention=tokens * _attention_width(run, repeats_keys=repeats_keys) * size,
        core=0 if forgets_core else _core(run, size, device),
        mlp=(num_expansions + keeps_cheap) * tokens * run.model.mlp_size // tensor * size,
        masks=2 * own_tokens * h * mask_bytes if run.model.dropout else 0,
        weights=_cast_weights(run, size),
    )


def published_layer_activations(run: Planned) -> float:
    """Bytes of one layer's activations by Korthikanti et al. 2022, Table 2, without or with recomputation.

    The formulas are for elements of two bytes and with dropout; `operators` is not in the table and counts as `none`.
    """
    s, b = run.training.sequence_length, run.micro_batch_size
    h, a, t = run.model.hidden_size, run.model.num_heads, run.layout.tensor
    split = t if run.layout.sequence_parallel else 1
    if run.training.recompute == "full":
        return 2 * s * b * h / split
    core = 0.0 if run.training.recompute == "selective" else 5 * a * s / (h * t)
    return s * b * h * (10 / split + 24 / t + core)


def activations_held(run: Planned, *, device: Device = "cuda") -> int:
    """Bytes of activations that all layers keep on one rank between a forward and a backward pass, weights included.

    Every `training.recompute_every`-th layer recomputes; the others keep all. While the backward pass of a
    recomputed layer runs, it adds the activations that the layer would keep without recomputation.
    """
    recomputed = num_recomputed_layers(run)
    mine, plain = layer_activations(run, device=device), layer_activations(run, device=device, mode="none")
    kept, kept_plain = mine.total + mine.weights, plain.total + plain.weights
    return recomputed * kept + (run.model.num_layers - recomputed) * kept_plain


def num_recomputed_layers(run: Planned) -> int:
    """Layers that do as `training.recompute` says: every `training.recompute_every`-th, from the first."""
    return 0 if run.training.recompute == "none" else -(-run.model.num_layers // run.training.recompute_every)


def _statistics_bytes(model: ModelConfig, size: int, device: Device) -> int:
    """Bytes that a norm keeps of a token beside its output: a mean and a deviation, on the CPU in the activations' type
    and on CUDA in float32 at least, or a root mean square, in float32 at least.
    """
    if model.norm == "rms":
        return max(size, 4)
    return 2 * (max(size, 4) if device == "cuda" else size)


def _head_statistics_bytes(run: Planned, size: int) -> int:
    """Bytes of the norms' statistics of a token's queries and keys, where each head has a norm."""
    heads = run.model.num_heads // run.layout.tensor + _own_kv_heads(run)
    return heads * max(size, 4) if run.model.qk_norm else 0


def _attention_width(run: Planned, *, repeats_keys: bool) -> int:
    """Elements of a token on a rank: queries, keys and values, and the output of attention.

    Norms and rotations make new queries and keys; values still lie among the old keys, which stay with them, and a
    norm keeps what it was given. Keys and values that are repeated for each head of queries are new ones, too.
    """
    model, tensor = run.model, run.layout.tensor
    queries, keys = model.query_size // tensor, _own_kv_heads(run) * model.head_size
    as_multiplied, as_used = queries + 2 * keys, 3 * queries if repeats_keys else queries + keys
    if model.qk_norm:
        return as_multiplied + as_used + queries
    if repeats_keys:
        return as_used + queries
    return as_used + 2 * keys + queries if model.positions == "rotary" else as_multiplied + queries


def _is_compiled(run: Planned, device: Device) -> bool:
    return run.is_compiled_on_gpus if device == "cuda" else run.training.compile == "on"


def _repeats_keys(run: Planned, capability: tuple[int, int]) -> bool:
    model = run.model
    if model.num_heads // run.layout.tensor == _own_kv_heads(run):
        return False
    compute = run.training.numbers.compute
    return not takes_shared_heads(compute, head_size=model.head_size, dropout=model.dropout, capability=capability)


def _own_kv_heads(run: Planned) -> int:
    return max(run.model.num_kv_heads // run.layout.tensor, 1)


def _core(run: Planned, size: int, device: Device) -> int:
    """Bytes that attention keeps beside its inputs and its output."""
    heads = run.model.num_heads // run.layout.tensor
    length, wide = run.training.sequence_length, max(size, 4)
    queries = run.micro_batch_size * heads * length
    if device == "cpu" and run.model.dropout:  # no fused kernel: float32 at least, for queries, keys and values too
        result_mask_and_rest = 3 * queries * length * wide
        keys = run.micro_batch_size * _own_kv_heads(run) * length
        return result_mask_and_rest + (queries + 2 * keys) * run.model.head_size * (wide - size)
    return queries * wide


def _cast_weights(run: Planned, size: int) -> int:
    """Sharded weights are gathered in the products' type, and let go or not by the sharding, not by the layer."""
    precision = run.training.numbers
    is_same = precision.compute == precision.accumulation
    return 0 if is_same or run.layout.shard_size > 1 else _layer_weights(run.model, run.layout.tensor) * size


@lru_cache(maxsize=4096)
def _layer_weights(model: ModelConfig, tensor: int) -> int:
    """Elements of a layer's matrices and norms on a rank, all of which the backward pass reads."""
    matrices = sum(part.size for part in layer_tensors(model, Layout(tensor=tensor)) if len(part.shape) > 1)
    per_norm = 2 if model.norm == "layer" else 1
    return matrices + 2 * per_norm * model.hidden_size + 2 * model.head_size * model.qk_norm
