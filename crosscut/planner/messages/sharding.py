"""Collectives among data ranks that shard one copy of the model (ZeRO, Rajbhandari et al. 2020).

Weights are gathered in units. A unit is one layer, or the root, which holds all parameters outside of the layers,
and those that layers use in float32 (`Parameter.is_wide`).
ZeRO-2 gathers each unit once per step. ZeRO-3 gathers each unit in every forward pass, and each layer once more in the
backward pass. Gradients are reduce-scattered in every micro-batch. In a pipeline, ZeRO-2 and ZeRO-3 send the same
messages: each unit is gathered once per step, and its gradients are reduce-scattered once per step. If there are
several copies of the model, the summed shards are all-reduced over the copies once per step. Messages are padded so
that each of the `n` ranks holds the same number of rows of each tensor:

    elements of a unit = sum of ceil(rows / n) * n * columns over the tensors of the unit
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from crosscut.architecture import LocalParameter, Operation, Overlap, Target
from crosscut.architecture.messages import Phase
from crosscut.architecture.readings import gathered_parameters, gathered_with_layer
from crosscut.config import ZeroStage
from crosscut.config.layouts.ranks import RankPlan
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.collective import Collective, along, at_once
from crosscut.planner.parameters import Shares
from crosscut.planner.stages import part_of


def sharded_parameters(run: Planned) -> list[Collective]:
    """Collectives of one step that gather weights and reduce gradients in a run with sharding (`layout.sharding`)."""
    layout, precision, part, target = run.layout, run.training.numbers, part_of(run), Target.of(run.layout)
    found: list[Collective] = []
    for layer, count in part.kinds.items():
        units = []
        for plan in layout.plans:
            mine = [p for p in gathered_with_layer(layer, target) if layout.ranks_of(experts=p.is_expert) is plan]
            name, is_first = "layer" if plan is layout.ranks else "expert", layer is part.layers[0]
            if mine:
                units.append(_Unit(name, plan, mine, precision.compute_bytes, count, is_first))
        found += _of_units(run, units)
    if root := gathered_parameters(part, target):
        found += _of_unit(run, _Unit("root", layout.ranks, root, precision.accumulation_bytes, 1))
    return found


class _Unit(NamedTuple):
    """Parameters that one collective gathers together: the parameters of a layer, its experts, or the root's."""

    name: str
    ranks: RankPlan
    """Plan of the ranks that store slices of the parameters."""
    parameters: Sequence[LocalParameter]
    weight_bytes: int
    """Bytes of one element of the gathered weights."""
    number: int
    """Number of equal units in the model."""

    has_first_layer: bool = True
    """Whether the model's first layer is among the units."""

    @property
    def is_layer(self) -> bool:
        return self.name != "root"

    @property
    def overlap(self) -> Overlap:
        """Computation that overlaps with the unit's messages: the neighbouring layer, or nothing for the root."""
        return Overlap.NEIGHBOUR_LAYER if self.is_layer else Overlap.NOTHING

    @property
    def trained(self) -> Sequence[LocalParameter]:
        """Parameters of the unit that have gradients."""
        return [parameter for parameter in self.parameters if not parameter.is_frozen]


def _of_units(run: Planned, units: Sequence[_Unit]) -> Iterator[Collective]:
    """Collectives of the units of one kind of layer, each with its share of the computation that hides them."""
    sent = [_of_unit(run, unit) for unit in units]
    gathers = at_once(*(gather for gather, *_ in sent))
    for gather, of_unit in zip(gathers, sent, strict=True):
        yield from (replace(each, share=gather.share) for each in of_unit) if len(units) > 1 else of_unit


def _of_unit(run: Planned, unit: _Unit) -> list[Collective]:
    """Collectives of all units of one kind, in the order in which a step runs them.

    Partial gradients are summed over the tensor ranks before the reduce-scatter, which uses the accumulation type.
    """
    layout, times = run.layout, unit.number * (run.num_micro_batches if run.layout.num_stages == 1 else 1)
    shares, num_shares = Shares.of(layout), unit.ranks.slices.size
    share, trained = (sum(map(shares.own, some)) for some in (unit.parameters, unit.trained))
    of_unit = partial(Collective, overlap=unit.overlap, layers=unit.number, has_first_layer=unit.has_first_layer)
    over_shares = along(of_unit, unit.ranks.slices)
    gather = partial(
        over_shares,
        elements=share * num_shares,
        operation=Operation.ALL_GATHER,
        purpose=f"{unit.name} weights",
        element_bytes=unit.weight_bytes,
        count=unit.number if layout.sharding is ZeroStage.ZERO2 else times,
    )
    gathers_again = unit.is_layer and layout.sharding is ZeroStage.ZERO3 and layout.num_stages == 1
    again = [gather(phase=Phase.BACKWARD)] if gathers_again else []
    gradient_bytes = run.training.numbers.accumulation_bytes
    scatter = over_shares(
        elements=trained * num_shares,
        operation=Operation.REDUCE_SCATTER,
        phase=Phase.BACKWARD,
        purpose=f"{unit.name} gradients",
        count=times,
        element_bytes=gradient_bytes,
    )
    copies = along(of_unit, unit.ranks.copies)(
        operation=Operation.ALL_REDUCE,
        phase=Phase.STEP,
        purpose=f"{unit.name} gradients of all copies",
        count=unit.number,
        elements=trained,
        element_bytes=gradient_bytes,
    )
    summed = [*_summed_over_tensor(run, unit, count=times), scatter, copies] if trained else []
    return [gather(phase=Phase.FORWARD), *again, *summed]


def _summed_over_tensor(run: Planned, unit: _Unit, *, count: int) -> list[Collective]:
    """All-reduces of partial gradients over the tensor ranks, one for each parameter of a unit.

    The ranks of a pipeline first sum the gradients of all micro-batches, in the accumulation type.
    """
    element_bytes = unit.weight_bytes if run.layout.num_stages == 1 else run.training.numbers.accumulation_bytes
    sizes = Counter(parameter.size for parameter in unit.parameters if parameter.has_partial_gradient)
    over_cuts = along(partial(Collective, operation=Operation.ALL_REDUCE), run.layout.ranks.cuts)
    return [
        over_cuts(
            phase=Phase.BACKWARD,
            purpose=f"{unit.name} replicated gradients",
            count=count * number,
            elements=size,
            element_bytes=element_bytes,
        )
        for size, number in sizes.items()
    ]
