"""Bytes that a step reads and writes outside its matrix products, in operators limited by memory bandwidth.

The count covers the tensors that each operator's kernel reads and writes. The table gives the count for one sublayer.
The unit is the residual stream of one micro-batch on one rank (b s h elements, divided by t if the sequence is split):

|                                            | compiled: forward | backward | uncompiled: forward | backward |
|--------------------------------------------|---|---|---|---|
| norm (the backward pass also adds the gradient of the residual path) | 2 | 4 | 2 | 5 + 3 for the sum |
| bias after the second matrix; its gradient | 0 | 1 | 2 | 1 |
| dropout, with a mask of m bytes per element | m | 2 + m | 2 + m | 2 + m |
| residual sum                               | 3 | 0 | 3 | 0 |

`crosscut.architecture` counts the bytes of each step of a layer. This module adds the bytes of passes over parameters:
casting weights, casting and summing gradients, the gradient norm and the optimizer.

Legend: `b` sequences of a micro-batch, `s` tokens of a sequence, `h` hidden size, `t` tensor ranks.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from crosscut.architecture import Decoder, Layer, Product, Step, Target, describe, flat, layer_parameters, lower
from crosscut.architecture.readings import passes
from crosscut.architecture.steps import Multiply
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.low_rank import low_rank
from crosscut.planner.muon import MUON_BYTES, muon_share
from crosscut.planner.parameters import Shares, known_vocab_size, trained_parameters_per_rank, trained_share
from crosscut.planner.program import Program
from crosscut.planner.stages import part_of

ADAMW_BYTES = 28
"""Bytes per parameter in float32: AdamW reads weight, gradient and two moments, and writes weight and moments."""
AVERAGE_BYTES = 12
"""Bytes per parameter in float32: the moving average reads average and weight, and writes the average."""
LOW_RANK_BYTES = 64
"""Bytes per element in float32 of a gradient in low rank: two tensors are divided or multiplied, two sums read two
tensors and write one, the products read the term twice and write the gradient, and the memory is replaced."""
_NORM_BYTES = 4
_CLIP_BYTES = {True: 8, False: 4}
"""Bytes per parameter in float32 to clip gradients. The key says whether a kernel of its own does it, as before Muon.
Otherwise, AdamW's kernel also writes the gradient."""
_KERNELS = {True: (12, 23), False: (15, 30)}
"""Number of kernels in a layer's forward pass and in its backward pass, not counting matrix products. The key says
whether the layer is compiled. Those of a compiled GPT-2 are counted (`benchmarks/gpu/count.py`)."""
_CAST_KERNELS = (23, 16)
"""Further kernels of a compiled layer that multiplies in 8 bits: the largest elements and the casts. Counted, too."""
_CAST_BYTES = 3
"""Bytes per element of a cast to 8 bits: the tensor is read in 16 bits and written in 8. The largest element is found
where the tensor is computed."""


class LayerPasses(NamedTuple):
    """Bytes and kernels of a layer's forward and backward pass in one micro-batch."""

    forward: float
    backward: float
    cheap: float
    """Bytes of the forward operators that `training.recompute = "operators"` repeats: norms and activation
    functions."""
    core: float
    """Bytes of the forward operators that `training.recompute = "selective"` repeats: unfused attention."""
    kernels: tuple[int, int]
    """Kernels of the forward and of the backward pass, not counting matrix products."""
    gelu: int
    """Number of elements that GeLU computes in the forward pass. The backward pass computes the same number."""


@lru_cache(maxsize=16384)
def layer_passes(layer: Layer, target: Target) -> LayerPasses:
    """Bytes and kernels of one layer in one micro-batch, without weight casts and gradient sums, which `weight_passes`
    counts.
    """
    steps = list(flat(lower(layer, target)))
    whole, (of_forward, of_backward) = passes(steps, target), _casts(steps, target)
    kernels = _KERNELS[target.compiled]
    more = _CAST_KERNELS if target.eight_bit else (0, 0)
    return LayerPasses(
        forward=whole.forward + of_forward,
        backward=whole.backward + of_backward,
        cheap=passes([step for step in steps if any(value.is_cheap for value in step.gives)], target).forward,
        core=passes([step for step in steps if step.is_core], target).forward,
        kernels=(kernels[0] + more[0], kernels[1] + more[1]),
        gelu=whole.gelu,
    )


def _casts(steps: Iterable[Step], target: Target) -> tuple[float, float]:
    """Bytes of casting the factors of all products to 8 bits, forward and backward; 0 without such products. Each of
    the three products of a matrix casts both of its factors.
    """
    cast = [step for step in steps if isinstance(step, Multiply) and step.is_in_eight_bits(target)]
    products = [product for step in cast for product in step.products(target)]
    forward = sum(_CAST_BYTES * _factors(product) for product in products)
    return forward, sum(_CAST_BYTES * (_factors(p.of_input) + _factors(p.of_weight)) for p in products)


def _factors(product: Product) -> float:
    """Number of elements of both factors."""
    m, k, n, batch = product.of_group
    return batch * (m * k + k * n)


def weight_passes(run: Planned, program: Program) -> tuple[float, float]:
    """Bytes that one rank reads and writes per micro-batch to cast weights and to sum gradients, as a mean over a step.

    Return two numbers: the bytes of casting weights to the compute type, and the bytes of casting gradients back and
    summing the gradients over micro-batches. The first micro-batch has no earlier gradients to add. Sharded
    weights are cast before the gather, so each rank casts only its shard. Products in 8 bits cast whole weights
    themselves (`layer_passes`), and their gradients need no cast.
    """
    precision = run.training.numbers
    narrow, wide = precision.compute_bytes, precision.accumulation_bytes
    added = 3 * wide * (1 - 1 / run.num_micro_batches)
    part, target, shares = part_of(run), Target.of(run.layout), Shares.of(run.layout)
    stored, trained = _layer_parameters(part, target, shares)
    if narrow == wide or not program.casts_weights:
        return 0.0, added * trained
    cast, cast_back = stored, trained
    if run.training.precision == "float8" and run.layout.shard_size == 1:
        cast, cast_back = _layer_parameters(part, target, shares, only_experts=True)
    return cast * (wide + narrow), cast_back * (narrow + wide) + trained * added


def ends_passes(run: Planned, target: Target) -> tuple[float, float]:
    """Bytes that embedding and loss read and write in one micro-batch, as (forward, backward).

    In a pipeline, only the first rank has the embedding, and only the last rank has the loss. In each pass, the
    embedding moves twice the bytes of the residual stream. The forward pass reads rows and writes them to the stream.
    The backward pass reads the stream's gradient and adds it to the rows' gradient.
    """
    known_vocab_size(run.model)
    part, ends = part_of(run), describe(run.model).loss.ends_passes(target)
    embedding = 2 * target.tokens * run.model.hidden_size * target.compute_bytes
    if part.is_last:
        left_out = 0 if part.is_first else embedding
        return ends.forward - left_out, ends.backward - left_out
    return (embedding, embedding) if part.is_first else (0, 0)


def optimizer_bytes(run: Planned, program: Program) -> float:
    """Bytes that the optimizer reads and writes on one rank in one step.

    The bytes are those of the gradient norm, of clipping and of the optimizer, which read and write the rank's shard of
    parameters, gradients and moments. If the run keeps a moving average of the weights, the bytes to update the rank's
    shard of the average are added. If several ranks sum whole gradients, the copies into and out of the buckets of
    the all-reduce are added, and for gradients in low rank, the terms and the errors. Muon's products are not counted
    here; `step_time` adds them.
    """
    part, layout, wide = part_of(run), run.layout, run.training.numbers.accumulation_bytes / 4
    own = trained_share(part, layout)
    if not own:  # a stage that only has experts, beside adapters
        return 0.0
    of_plans = [(plan.tokens.size, trained_parameters_per_rank(part, layout, plan)) for plan in layout.plans]
    copied = sum(elements for readers, elements in of_plans if readers > 1) if layout.shard_size == 1 else 0
    updated = sum(elements / readers for readers, elements in of_plans) if program.shards_optimizer else own
    of_adamw = ADAMW_BYTES + _CLIP_BYTES[program.clips_apart]
    of_muon = muon_share(run) * wide * (MUON_BYTES + _CLIP_BYTES[True] - of_adamw)
    average = AVERAGE_BYTES if run.optimizer.ema_decay else 0
    in_low_rank = sum(low_rank(run, plan).gradients for plan in layout.plans)
    of_update = (of_adamw + _NORM_BYTES + average) * (updated / own)
    copied = max(copied - in_low_rank, 0)
    return own * wide * (of_update + 16 * (copied / own)) + of_muon + in_low_rank * wide * LOW_RANK_BYTES


@lru_cache(maxsize=4096)
def _layer_parameters(
    part: Decoder, target: Target, shares: Shares, *, only_experts: bool = False
) -> tuple[float, int]:
    """Number of parameters of all layers that one rank stores, as a mean over the ranks, and number of trainable
    parameters on one tensor rank.
    """
    parts = [(p, count) for layer, count in part.kinds.items() for p in layer_parameters(layer, target)]
    if only_experts:
        parts = [(p, count) for p, count in parts if p.is_expert]
    experts = sum(count * p.size for p, count in parts if p.is_expert)
    dense = sum(count * p.size for p, count in parts) - experts
    trained = sum(count * p.size for p, count in parts if not p.is_frozen)
    return dense / shares.dense + experts / shares.experts, trained
