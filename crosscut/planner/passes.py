"""Bytes that a step reads and writes outside its matrix products, in operators that wait for memory, not arithmetic.

Counted are the tensors that each operator's kernel reads and writes. In units of E, the residual stream of one
micro-batch on one rank (b s h elements, a t-th of it if the sequence is split), half a layer takes:

|                                            | compiled forward | backward | eager forward | backward |
|--------------------------------------------|---|---|---|---|
| norm; backward with the gradient that goes around it | 2 | 4 | 2 | 5 + 3 |
| bias after the second matrix; its gradient | 0 | 1 | 2 | 1 |
| dropout, with a mask of m bytes an element | m | 2 + m | 2 + m | 2 + m |
| residual                                   | 3 | 0 | 3 | 0 |

The counts of a layer stand with its steps in `crosscut.architecture`. Weights that are cast for the products, gradients
that are cast back and added up, AdamW and the norm of gradients are counted here, by the parameter. Legend: as in
`activations`.
"""

from functools import lru_cache
from typing import NamedTuple

from crosscut.architecture import Layer, Target, describe, flat, layer_parameters, lower
from crosscut.architecture.readings import passes
from crosscut.config import ModelConfig
from crosscut.planner.candidate import Planned
from crosscut.planner.parameters import known_vocab_size, parameters_per_rank
from crosscut.planner.program import Program

ADAMW_BYTES = 28
"""Per parameter: weight, gradient and two moments read, three of them written, in float32."""
_NORM_AND_CLIP_BYTES = 12
_KERNELS = {True: (5, 12), False: (15, 30)}
"""Kernels of a layer's forward and backward pass beside its products, compiled or not."""


class LayerPasses(NamedTuple):
    """Bytes and kernels of a layer's forward and backward pass in one micro-batch."""

    forward: float
    backward: float
    cheap: float
    """Bytes of norms and activations in the forward pass, which `training.recompute = "operators"` repeats."""
    core: float
    """Bytes of unfused attention in the forward pass, which `training.recompute = "selective"` repeats."""
    forward_kernels: int
    backward_kernels: int
    gelu: int
    """Elements that GeLU computes, forward and once more backward."""


@lru_cache(maxsize=16384)
def layer_passes(layer: Layer, target: Target) -> LayerPasses:
    """One layer in one micro-batch, without its weights."""
    steps = list(flat(lower(layer, target)))
    whole = passes(steps, target)
    forward_kernels, backward_kernels = _KERNELS[target.compiled]
    return LayerPasses(
        forward=whole.forward,
        backward=whole.backward,
        cheap=passes([step for step in steps if any(value.is_cheap for value in step.gives)], target).forward,
        core=passes([step for step in steps if step.is_core], target).forward,
        forward_kernels=forward_kernels,
        backward_kernels=backward_kernels,
        gelu=whole.gelu,
    )


def weight_passes(run: Planned, program: Program) -> tuple[float, float]:
    """Bytes of all of a rank's weights in one micro-batch, the mean of a step's: cast for the forward pass; gradients
    cast back and summed.

    The first micro-batch has nothing to add to. Shares of sharded weights are cast before they are gathered.
    """
    precision = run.training.numbers
    narrow, wide = precision.compute_bytes, precision.accumulation_bytes
    added = 3 * wide * (1 - 1 / run.num_micro_batches)
    if narrow == wide or not program.casts_weights:
        return 0.0, added * _layer_parameters(run.model, run.layout.tensor)
    own = _layer_parameters(run.model, run.layout.tensor) / run.layout.shard_size
    return own * (wide + narrow), _layer_parameters(run.model, run.layout.tensor) * (narrow + wide + added)


def ends_passes(run: Planned, target: Target) -> tuple[float, float]:
    """Embedding and loss in one micro-batch, forward and backward."""
    known_vocab_size(run.model)
    ends = describe(run.model).loss.ends_passes(target)
    return ends.forward, ends.backward


def optimizer_bytes(run: Planned, program: Program) -> float:
    """Bytes that one step reads and writes on a rank for the optimizer.

    The gradient norm, clipping and AdamW pass over the rank's share of parameters, gradients and moments. Gradients
    that are not sharded also pass through the buckets in which they go to the other data ranks.
    """
    wide = run.training.numbers.accumulation_bytes / 4
    own = parameters_per_rank(run.model, run.layout) / run.layout.shard_size
    buckets = 16 if run.layout.data > 1 and run.layout.shard_size == 1 else 0
    sharing = run.layout.data if program.shards_optimizer else 1
    return own * wide * ((ADAMW_BYTES + _NORM_AND_CLIP_BYTES) / sharing + buckets)


@lru_cache(maxsize=4096)
def _layer_parameters(model: ModelConfig, tensor: int) -> int:
    """Parameters of all layers on one rank."""
    kinds = describe(model).kinds.items()
    return sum(count * p.size for layer, count in kinds for p in layer_parameters(layer, tensor))
