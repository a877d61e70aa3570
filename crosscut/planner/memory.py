"""The most bytes that one rank holds at once in a training step, by what they are.

A step has a few instants at which something is at its most; the forecast is the largest of them. `A` are the
activations of all layers, `G` the gradients, `E` the gradient of the vocabulary's part of a rank:

| instant              | beside weights and optimizer                                                            |
|----------------------|-----------------------------------------------------------------------------------------|
| loss                 | A, the last hidden states and their gradient, E, a chunk's logits                         |
| backward, last layer | A, what the layer needs for a moment, E                                                   |
| backward, embedding  | G, the sum of both uses of the vocabulary, the buckets that are on their way              |
| reduction            | G, all buckets                                                                            |
| step                 | G, what AdamW needs beside it                                                             |

From the second micro-batch on G is there from the beginning. The derivations are in `docs/planner.md`; the dry run
(`crosscut.rehearsal`) counts the same from the program.

Legend: as in `activations`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crosscut.config import Layout, ModelConfig, default_loss_chunk, padded_vocab_size
from crosscut.config.precision import PRECISIONS
from crosscut.planner.activations import Device, layer_activations, num_recomputed_layers
from crosscut.planner.candidate import Planned
from crosscut.planner.parameters import LocalTensor, known_vocab_size, layer_tensors, root_tensors

FRAGMENTATION = 0.05
"""Share of what comes and goes in a step that a caching allocator holds besides, in blocks that fit nothing."""


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Bytes of one rank at the peak of a step, from the second step on."""

    instant: str
    """When it is."""

    weights: int = 0
    """In the type of the products."""

    gradients: int = 0
    """Of all parameters that have one by then, and on the way there."""

    master_weights: int = 0
    """In the type of sums, where that is another one."""

    optimizer: int = 0
    """AdamW's moments."""

    activations: int = 0
    """What layers keep for the backward pass, and what the one that runs needs."""

    logits: int = 0
    """Of a chunk of tokens."""

    buffers: int = 0
    """Of communication: gradients on their way in buckets, weights gathered from shares."""

    allowance: int = 0
    """`FRAGMENTATION` of what comes and goes; none on the CPU."""

    @property
    def total(self) -> int:
        """All together."""
        state = self.weights + self.gradients + self.master_weights + self.optimizer
        return state + self.activations + self.logits + self.buffers + self.allowance


def forecast_memory(run: Planned, *, device: Device = "cuda") -> MemoryForecast:
    """What one rank of `run` holds at the peak of a step.

    Raises `ConfigError` where `model.vocab_size` is still 0.
    """
    return max(_instants(run, device), key=lambda forecast: forecast.total)


class _Sizes(NamedTuple):
    """Elements on a rank."""

    layer: int
    root: int
    layer_share: int
    root_share: int
    vocabulary: int
    """Of the rows that the loss multiplies by."""
    largest: int
    """Of a layer's matrices."""


@lru_cache(maxsize=4096)
def _sizes(model: ModelConfig, tensor: int, shares: int) -> _Sizes:
    layout = Layout(tensor=tensor)
    layer, root = layer_tensors(model, layout), root_tensors(model, layout)
    return _Sizes(
        layer=sum(t.size for t in layer),
        root=sum(t.size for t in root),
        layer_share=sum(_share(t, shares) for t in layer),
        root_share=sum(_share(t, shares) for t in root),
        vocabulary=padded_vocab_size(known_vocab_size(model), tensor) // tensor * model.hidden_size,
        largest=max(t.size for t in layer),
    )


def _share(tensor: LocalTensor, shares: int) -> int:
    rows = tensor.shape[0]
    return -(-rows // shares) * (tensor.size // rows)


def _instants(run: Planned, device: Device) -> list[MemoryForecast]:
    """The forecast of each instant."""
    model, layout, training = run.model, run.layout, run.training
    precision = PRECISIONS[training.precision]
    size, wide = precision.compute_bytes, precision.accumulation_bytes
    sizes = _sizes(model, layout.tensor, layout.shard_size)
    sharded, L = layout.shard_size > 1, model.num_layers
    own = L * sizes.layer_share + sizes.root_share
    accumulated = run.num_micro_batches > 1
    offloads_moments = "optimizer" in training.offload and device == "cuda"
    is_mixed = size != wide

    mine = layer_activations(run, device=device)
    plain = layer_activations(run, device=device, mode="none")
    recomputed = num_recomputed_layers(run)
    cast = recomputed * mine.weights + (L - recomputed) * plain.weights
    held = cast + recomputed * mine.total + (L - recomputed) * plain.total
    tokens = run.micro_batch_size * training.sequence_length
    between = (tokens // layout.tensor if layout.sequence_parallel else tokens) * model.hidden_size * size
    whole = tokens * model.hidden_size * size
    again = plain.total - mine.total if training.recompute == "full" else 0
    mlp = tokens * model.mlp_size // layout.tensor * size
    working = again + mlp + 3 * between + (whole if layout.sequence_parallel else 0)

    local_vocab = sizes.vocabulary // model.hidden_size
    chunk = min(tokens, default_loss_chunk(local_vocab, tokens, device=device))
    logits = chunk * local_vocab * (wide + size if is_mixed else size)
    vocabulary_gradient = sizes.vocabulary * wide

    gathered = _gathered(run, sizes, size, wide) if sharded else 0
    moments = 2 * own * wide
    gradients = own * wide
    buckets = gradients if layout.data > 1 and not sharded else 0
    whole_gradients = (sizes.layer * (size + wide) + sizes.root * wide) if sharded else 0

    def at(instant: str, **held: int) -> MemoryForecast:
        comes_and_goes = sum(held.values())
        weights = held.pop("weights", 0)
        return MemoryForecast(
            instant=instant,
            weights=weights if is_mixed else weights + own * wide,
            master_weights=own * wide if is_mixed else 0,
            optimizer=0 if offloads_moments else moments,
            allowance=int(FRAGMENTATION * comes_and_goes) if device == "cuda" else 0,
            **held,
        )

    before = gradients if accumulated else 0
    return [
        at(
            "loss",
            weights=cast + (sizes.vocabulary * size if is_mixed else 0),
            gradients=before + vocabulary_gradient,
            activations=held - cast + 2 * whole + between,
            logits=logits,
            buffers=gathered,
        ),
        at(
            "backward, last layer",
            weights=cast,
            gradients=before + vocabulary_gradient + sizes.largest * (size + wide if is_mixed else wide),
            activations=held - cast + between + working,
            buffers=gathered + (sizes.layer * (size + wide) if sharded else 0),
        ),
        at(
            "backward, embedding",
            gradients=gradients + (whole_gradients if sharded else 0) + 2 * vocabulary_gradient,
            activations=2 * between,
            buffers=gathered + buckets,
        ),
        at("reduction", gradients=gradients, buffers=buckets),
        at("step", gradients=gradients),
    ]


def _gathered(run: Planned, sizes: _Sizes, size: int, wide: int) -> int:
    """Bytes of weights that are gathered at once: the root and every layer's, or two layers'."""
    at_once = run.model.num_layers if run.layout.sharding == "zero2" else min(2, run.model.num_layers)
    return sizes.root * wide + at_once * sizes.layer * size
