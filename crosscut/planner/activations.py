"""Activations that layers keep from forward to backward pass, in bytes on one rank, beside published formulas.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4 and Table 2) count, for elements of two bytes and dropout masks of
one, on `t` tensor ranks:

    no parallelism                         s b h (34 + 5 a s / h)
    tensor                                 s b h (10 + 24 / t + 5 a s / (h t))
    tensor and sequence                    s b h / t (34 + 5 a s / h)
    ... with the attention core recomputed the same without the term 5 a s / h
    whole layers recomputed                2 s b h, split by t where the sequence is

Crosscut differs in three respects. Attention runs in a fused kernel that keeps one number per query and head instead
of the scores (5 a s / h), so recomputing the core saves little. (On GPUs no such kernel takes float64; its scores are
not counted.) A dropout of probability zero keeps no mask. Weights that are multiplied in a narrower type than they are
held in are kept in the narrow type for the backward pass. They are counted apart, since they do not grow with the
batch.

Legend: `s` tokens of a sequence, `b` sequences of a micro-batch, `h` hidden size, `a` heads, `t` tensor ranks.
"""

from dataclasses import replace

from crosscut.architecture import Device, Kept, Layer, Target, describe, kept
from crosscut.architecture.readings import weights_read
from crosscut.config.conventions import AMPERE
from crosscut.config.precision import precision_on
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Candidate, Planned, target_of


def layer_activations(
    run: Planned, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE, mode: str | None = None
) -> Kept:
    """Bytes that the first layer keeps on `device` under `training.recompute`.

    `mode` replaces `training.recompute`: `none` gives the bytes that a recomputed layer holds during its backward pass.
    `capability` is the GPU's compute capability, on which it depends whether its attention kernel can share heads of
    keys and values.
    """
    run = Candidate.of(run, precision_on(device))
    target = target_of(run, device=device, capability=capability)
    return sum(activations_of(describe(run.model).layers[0], run, target, mode or run.training.recompute), Kept())


def activations_of(layer: Layer, run: Planned, target: Target, mode: str) -> tuple[Kept, ...]:
    """Bytes that each sublayer of a layer keeps on a target. The layer's weights count for the first sublayer.

    Inputs that are offloaded from a GPU do not count.
    """
    if mode == Recompute.FULL and "activations" in run.training.offload and target.device == "cuda":
        return Kept(), Kept()
    first, *others = kept(layer, target, mode)
    return replace(first, weights=0 if mode == Recompute.FULL else _cast_weights(layer, run)), *others


def _cast_weights(layer: Layer, run: Planned) -> int:
    """Bytes of a layer's weights in the type of its products, if they are held in another type.

    Sharded weights are gathered in the type of the products, and the sharding decides how long they stay.
    """
    precision = run.training.numbers
    is_same = precision.compute == precision.accumulation
    if is_same or run.layout.shard_size > 1:
        return 0
    return weights_read(layer, run.layout.tensor) * precision.compute_bytes


def published_layer_activations(run: Planned) -> float:
    """Bytes of one layer's activations by Korthikanti et al. 2022, Table 2, without or with recomputation.

    The formulas are for elements of two bytes and with dropout; `operators` is not in the table and counts as `none`.
    """
    s, b = run.training.sequence_length, run.micro_batch_size
    h, a, t = run.model.hidden_size, run.model.num_heads, run.layout.tensor
    split = t if run.layout.sequence_parallel else 1
    if run.training.recompute == Recompute.FULL:
        return 2 * s * b * h / split
    core = 0.0 if run.training.recompute == Recompute.SELECTIVE else 5 * a * s / (h * t)
    return s * b * h * (10 / split + 24 / t + core)


def activations_held(run: Planned, *, device: Device = "cuda") -> int:
    """Bytes of activations that all layers keep on one rank between a forward and a backward pass, weights included.

    Every `training.recompute_every`-th layer recomputes; the others keep everything. While the backward pass of a
    recomputed layer runs, it adds the activations that the layer would keep without recomputation.
    """
    run = Candidate.of(run, precision_on(device))
    target, decoder = target_of(run, device=device), describe(run.model)
    again = decoder.recomputed(recomputation_step(run))
    held = 0
    for layer, count in decoder.kinds.items():
        mine = sum(activations_of(layer, run, target, run.training.recompute), Kept())
        plain = sum(activations_of(layer, run, target, Recompute.NONE), Kept())
        held += again[layer] * (mine.total + mine.weights)
        held += (count - again[layer]) * (plain.total + plain.weights)
    return held


def recomputation_step(run: Planned) -> int:
    """Distance between layers that recompute, the first layer being one of them; 0 if none recomputes."""
    return 0 if run.training.recompute == Recompute.NONE else run.training.recompute_every


def num_recomputed_layers(run: Planned) -> int:
    """Layers that recompute as `training.recompute` says: every `training.recompute_every`-th, from the first."""
    return 0 if run.training.recompute == Recompute.NONE else -(-run.model.num_layers // run.training.recompute_every)
