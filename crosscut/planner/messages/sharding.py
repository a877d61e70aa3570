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
from typing import NamedTuple

from crosscut.architecture import LocalParameter, Operation, Overlap, describe, layer_parameters, root_parameters
from crosscut.architecture.messages import Phase
from crosscut.config import Layout, ZeroStage
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.collective import Axis, Collective


def sharded_parameters(run: Planned) -> list[Collective]:
    """The collectives of one step for the weights and gradients of a run that shards them."""
    precision, tensor = run.training.numbers, run.layout.tensor
    decoder = describe(run.model)
    units = [
        _Unit("layer", layer_parameters(layer, tensor), precision.compute_bytes, count)
        for layer, count in decoder.kinds.items()
    ]
    units.append(_Unit("root", root_parameters(decoder, tensor), precision.accumulation_bytes, 1))
    return [collective for unit in units for collective in _of_unit(run, unit)]


def shard_axis(layout: Layout) -> Axis:
    """The axis over which a copy is shared: all of the data axis, or the part of it that is a group."""
    return "data" if layout.num_replicas == 1 else "shard"


class _Unit(NamedTuple):
    """Parameters that are gathered together: those of a layer, or of the root."""

    name: str
    parameters: Sequence[LocalParameter]
    weight_bytes: int
    """Bytes of an element of the gathered weights."""
    number: int
    """Equal units that the model has."""

    @property
    def is_layer(self) -> bool:
        return self.name == "layer"

    @property
    def overlap(self) -> Overlap:
        """Layers are gathered one layer ahead; nothing overlaps with the messages of the root."""
        return Overlap.NEIGHBOUR_LAYER if self.is_layer else Overlap.NOTHING

    def padded_elements(self, num_shares: int) -> int:
        """Elements of a message, with every tensor padded to equal shares of its rows."""
        return sum(-(-p.shape[0] // num_shares) * num_shares * prod(p.shape[1:]) for p in self.parameters)


def _of_unit(run: Planned, unit: _Unit) -> list[Collective]:
    """Collectives of all equal units of a kind, in the order of a step.

    Gradients are scattered in the type of the master weights. Each partial gradient is first summed over the tensor
    ranks.
    """
    layout, times = run.layout, run.num_micro_batches * unit.number
    elements = unit.padded_elements(layout.shard_size)
    of_unit = partial(Collective, overlap=unit.overlap, layers=unit.number)
    over_shares = partial(of_unit, axis=shard_axis(layout), elements=elements, ranks=layout.shard_size)
    gather = partial(
        over_shares,
        operation=Operation.ALL_GATHER,
        purpose=f"{unit.name} weights",
        element_bytes=unit.weight_bytes,
        count=unit.number if layout.sharding is ZeroStage.ZERO2 else times,
    )
    again = [gather(phase=Phase.BACKWARD)] if unit.is_layer and layout.sharding is ZeroStage.ZERO3 else []
    gradient_bytes = run.training.numbers.accumulation_bytes
    scatter = over_shares(
        operation=Operation.REDUCE_SCATTER,
        phase=Phase.BACKWARD,
        purpose=f"{unit.name} gradients",
        count=times,
        element_bytes=gradient_bytes,
    )
    copies = of_unit(
        operation=Operation.ALL_REDUCE,
        axis="replica",
        phase=Phase.STEP,
        purpose=f"{unit.name} gradients of all copies",
        count=unit.number,
        elements=elements // layout.shard_size,
        element_bytes=gradient_bytes,
        ranks=layout.num_replicas,
    )
    return [gather(phase=Phase.FORWARD), *again, *_summed_over_tensor(run, unit, count=times), scatter, copies]


def _summed_over_tensor(run: Planned, unit: _Unit, *, count: int) -> list[Collective]:
    """Sums of partial gradients over the tensor ranks, one for each parameter."""
    tensor, split = run.layout.tensor, run.layout.sequence_parallel
    sizes = Counter(p.size for p in unit.parameters if p.has_partial_gradient(tensor, split=split))
    return [
        Collective(
            operation=Operation.ALL_REDUCE,
            axis="tensor",
            phase=Phase.BACKWARD,
            purpose=f"{unit.name} replicated gradients",
            count=count * number,
            elements=size,
            element_bytes=unit.weight_bytes,
            ranks=tensor,
        )
        for size, number in sizes.items()
    ]
