"""Search for a faster cut of layers into pipeline stages.

The default cut balances FLOPs (`planner.stages`). This is not always the fastest cut. For example, messages between
tensor ranks take the same time in each layer, but the logits need only one. If these messages are slow, the last stage
can have more layers than its FLOPs suggest. The planner knows the seconds of each stage on the hardware, so it can
compare cuts by the time of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from crosscut.planner.candidate import Candidate
from crosscut.planner.search.plans import Plan
from crosscut.planner.stages import stage_sizes

_WORTHWHILE = 0.99
"""Share of the default cut's time that another cut may take at most. For a smaller gain, a plan keeps the default cut,
which needs no setting.
"""
_MOST_RECEIVERS = 4
"""Number of stages that are tried as receivers of a layer."""


def with_faster_cut(
    plan: Plan, forecast: Callable[[Candidate], Plan | None], times: Callable[[Candidate], Sequence[float]]
) -> Plan:
    """Return the plan with the fastest cut found, or the plan itself if no cut is at least 1% faster.

    `forecast` returns the plan of a candidate, or None if the candidate does not fit into memory. `times` returns the
    seconds of a micro-batch in each stage of a candidate. Again and again, the slowest stage gives one layer to the
    stage for which this makes the step fastest, until no such move makes the step faster. If each rank has several
    stages, the stages stay equal.
    """
    if plan.candidate.layout.stages_per_rank > 1:
        return plan
    fastest, improves = plan, True
    while improves:
        moved = [forecast(candidate) for candidate in _with_one_layer_moved(fastest.candidate, times)]
        best = min((found for found in moved if found), key=lambda found: found.time.total, default=fastest)
        improves = best.time.total < fastest.time.total
        fastest = best if improves else fastest
    return fastest if fastest.time.total <= _WORTHWHILE * plan.time.total else plan


def _with_one_layer_moved(candidate: Candidate, times: Callable[[Candidate], Sequence[float]]) -> Iterator[Candidate]:
    """Candidates whose slowest stage has given a layer to one of the fastest stages."""
    sizes, seconds = stage_sizes(candidate), times(candidate)
    by_time = sorted(range(len(sizes)), key=seconds.__getitem__)
    giver = by_time[-1]
    if sizes[giver] == 1:
        return
    for receiver in by_time[:-1][:_MOST_RECEIVERS]:
        moved = [size - (stage == giver) + (stage == receiver) for stage, size in enumerate(sizes)]
        yield Candidate.at(
            candidate._replace(layout=replace(candidate.layout, stages=tuple(moved))), candidate.pipeline_rank
        )
