"""Search for a faster cut of layers into pipeline stages.

The default cut balances FLOPs (`planner.stages`). This is not always the fastest cut. For example, every layer sends
more data between tensor ranks than the output projection. If this communication is slow, the last stage can have more
layers than its FLOPs suggest. The planner knows how long each stage takes on the hardware, so it can compare cuts by
the time of a step.
"""

from collections.abc import Iterator
from dataclasses import replace

from crosscut.planner.candidate import Candidate
from crosscut.planner.products import Speed
from crosscut.planner.search.plans import Plan, forecast
from crosscut.planner.stages import stage_sizes
from crosscut.planner.time import times_of_stages

_WORTHWHILE = 0.99
"""Longest time that a step may take with another cut, as a share of its time with the default cut. If the step takes
longer, the plan keeps the default cut, which needs no setting."""
_MOST_RECEIVERS = 4
"""Number of stages that are tried as receivers of a layer."""


def with_faster_cut(plan: Plan, speed: Speed) -> Plan:
    """Return the plan with the fastest cut found, or the plan itself if no cut is at least 1% faster.

    The search moves one layer from the slowest stage to another stage, choosing the stage that makes the step fastest,
    and repeats this until no move makes the step faster. If each rank has several stages, the search changes nothing,
    because these stages must be equal.
    """
    if plan.candidate.layout.stages_per_rank > 1:
        return plan
    fastest, improves = plan, True
    while improves:
        moved = [forecast(candidate, speed) for candidate in _with_one_layer_moved(fastest.candidate, speed)]
        best = min(
            (found for found in moved if isinstance(found, Plan)), key=lambda found: found.time.total, default=fastest
        )
        improves = best.time.total < fastest.time.total
        fastest = best if improves else fastest
    return fastest if fastest.time.total <= _WORTHWHILE * plan.time.total else plan


def _with_one_layer_moved(candidate: Candidate, speed: Speed) -> Iterator[Candidate]:
    """Yield candidates in which one layer has moved from the slowest stage to one of the fastest stages."""
    sizes, seconds = stage_sizes(candidate), times_of_stages(candidate, speed)
    by_time = sorted(range(len(sizes)), key=seconds.__getitem__)
    giver = by_time[-1]
    if sizes[giver] == 1:
        return
    for receiver in by_time[:-1][:_MOST_RECEIVERS]:
        moved = [size - (stage == giver) + (stage == receiver) for stage, size in enumerate(sizes)]
        yield replace(candidate, layout=replace(candidate.layout, stages=tuple(moved)))
