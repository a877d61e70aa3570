"""Collectives among data ranks that share one copy of the model (Rajbhandari et al. 2020).

Weights are gathered unit by unit, a unit being a layer or the root, which is all that belongs to no layer. ZeRO-2
gathers them once a step, ZeRO-3 in each forward pass, and the layers again in the backward pass. Every micro-batch's
gradients are scattered; their sums are reduced with the sums of other copies once a step. Messages are padded: `n`
ranks cut the rows of a tensor rank's part into equal shares.

    elements of a unit = sum over its tensors of ceil(rows / n) n columns
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import prod

from crosscut.architecture import LocalParameter, Operation, Overlap, describe, layer_parameters, root_parameters
from crosscut.architecture.messages import Phase
from crosscut.config import Layout
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.collective import Axis, Collective


def sharded_parameters(run: Planned) -> list[Collective]:
    """The collectives of one step for the weights and gradients of a run that shards them."""
    precision, tensor = run.training.numbers, run.layout.tensor
    decoder = describe(run.model)
    collectives = []
    for layer, count in decoder.kinds.items():
        collectives += _of_unit(run, "layer", layer_parameters(layer, tensor), precision.compute_bytes, times=count)
    return collectives + _of_unit(run, "root", root_parameters(decoder, tensor), precision.accumulation_bytes)


def shard_axis(layout: Layout) -> Axis:
    """The axis over which a copy is shared: all of the data axis, or the part of it that is a group."""
    return "data" if layout.num_replicas == 1 else "shard"


def _of_unit(
    run: Planned, unit: str, parameters: Sequence[LocalParameter], weight_bytes: int, *, times: int = 0
) -> list[Collective]:
    """Collectives of one unit: of `times` equal layers, or of the root for 0.

    Weights are gathered in a type of `weight_bytes`, gradients scattered in the type of the master weights. A layer is
    gathered one layer ahead. Each partial gradient is first summed over the tensor ranks.
    """
    layout, micro_batches, is_layer = run.layout, run.num_micro_batches, times > 0
    times = max(times, 1)
    gatherings = 1 if layout.sharding == "zero2" else micro_batches
    gradient_bytes = run.training.numbers.accumulation_bytes
    overlap = Overlap.NEIGHBOUR_LAYER if is_layer else Overlap.NOTHING
    elements = sum(_padded(parameter, layout.shard_size) for parameter in parameters)
    over_shares = partial(
        Collective,
        axis=shard_axis(layout),
        elements=elements,
        ranks=layout.shard_size,
        overlap=overlap,
        layers=times,
    )
    gather = partial(over_shares, operation=Operation.ALL_GATHER, purpose=f"{unit} weights", element_bytes=weight_bytes)
    collectives = [gather(phase=Phase.FORWARD, count=gatherings * times)]
    if is_layer and layout.sharding == "zero3":
        collectives.append(gather(phase=Phase.BACKWARD, count=gatherings * times))
    collectives += _summed_over_tensor(run, unit, parameters, weight_bytes, count=micro_batches * times)
    scatter = over_shares(
        operation=Operation.REDUCE_SCATTER,
        phase=Phase.BACKWARD,
        purpose=f"{unit} gradients",
        count=micro_batches * times,
        element_bytes=gradient_bytes,
    )
    copies = Collective(
        operation=Operation.ALL_REDUCE,
        axis="replica",
        phase=Phase.STEP,
        purpose=f"{unit} gradients of all copies",
        count=times,
        elements=elements // layout.shard_size,
        element_bytes=gradient_bytes,
        ranks=layout.num_replicas,
        overlap=overlap,
        layers=times,
    )
    return [*collectives, scatter, copies]


def _summed_over_tensor(
    run: Planned, unit: str, parameters: Sequence[LocalParameter], element_bytes: int, *, count: int
) -> list[Collective]:
    """Sums of partial gradients over the tensor ranks, one for each parameter."""
    tensor, split = run.layout.tensor, run.layout.sequence_parallel
    sizes = Counter(p.size for p in parameters if p.has_partial_gradient(tensor, split=split))
    return [
        Collective(
            operation=Operation.ALL_REDUCE,
            axis="tensor",
            phase=Phase.BACKWARD,
            purpose=f"{unit} replicated gradients",
            count=count * number,
            elements=size,
            element_bytes=element_bytes,
            ranks=tensor,
        )
        for size, number in sizes.items()
    ]


def _padded(parameter: LocalParameter, num_shares: int) -> int:
    rows, *columns = parameter.shape
    return -(-rows // num_shares) * num_shares * prod(columns)
