"""Search over layouts with a pipeline.

There are many more layouts with a pipeline than without. For each of them, the search first computes a lower bound on
the time of a step, which needs no simulation. The search then forecasts the layouts in the order of their bounds. It
stops when the bound exceeds the time of the layouts that it keeps, so the result is the same as if all layouts were
forecast.

A rank that takes t seconds for its part of a micro-batch cannot end its m micro-batches before

    (t of all ranks before it) / V + m t

because its first micro-batch must come from the ranks before it, and the gradients of its last one must go back to them
(V: stages per rank). For all ranks together, this time is least if t falls by a factor of 1 - 1 / (m V) from rank to
rank. If c is the time of a micro-batch in the whole model, all passes of a step take at least

    c / V / (1 - (1 - 1 / (m V))^P)

The time of the gradient sums and of the optimizer is added. With the zero-bubble schedule, weight gradients may fill
the waiting time at the end of a step. Then only the forward passes of the earlier ranks must come first, so 1 / V is
replaced by the share of a forward pass in t. The bound assumes that messages to other stages take no time.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from crosscut.config import Layout, TrainingConfig, ZeroStage
from crosscut.config.checks import divisors
from crosscut.config.layout import PipelineSchedule
from crosscut.config.training import Compile, Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.hardware import Hardware
from crosscut.planner.products import Speed
from crosscut.planner.search.cuts import with_faster_cut
from crosscut.planner.search.plans import MOST_PIPELINES, Plan, Rejected, forecast
from crosscut.planner.search.proposals import candidate_of, layouts_of, trainings
from crosscut.planner.search.reasons import (
    MOST_PASSES,
    reason_against_asked_compiling,
    reason_against_several_stages,
)
from crosscut.planner.stages import separates_weights
from crosscut.planner.time import shortest_step, time_around_passes, times_of_stages


def search_pipelines(
    run: Candidate, speed: Speed, arranged: Iterable[Layout], others: Iterable[float]
) -> tuple[list[Plan], list[Rejected]]:
    """Return the fastest layouts with a pipeline, and the arrangements of ranks for which no layout is possible or
    fits. `arranged` has the arrangements to try, which all have a pipeline. For each layout without a pipeline,
    `others` has the seconds of a step.

    A layout is kept if it is among the `MOST_PIPELINES` fastest of all layouts. The search tries

    - three kinds of schedule: 1F1B with one stage per rank; 1F1B with several stages per rank, whose number is the
      smallest or the largest that divides the layers of a rank (if the number of micro-batches is a multiple of the
      pipeline ranks); and zero bubble (if layers need not be compiled),
    - whole copies of the state, and ZeRO-2 over all data ranks. In a pipeline, ZeRO-3 holds and sends as much as
      ZeRO-2,
    - micro-batch sizes that give a step at least as many micro-batches as the pipeline has ranks, and at most
      `MOST_PASSES` passes,
    - sequence parallelism and recomputation as without a pipeline.

    All of these layouts have the default cut of layers into stages. The search then looks for a faster cut for each
    layout that it keeps (`cuts`).
    """
    search = _PipelineSearch(run, speed, sorted(others))
    rejected: list[Rejected] = []
    tries: list[_Try] = []
    for plain in arranged:
        layouts = list(_layouts(run, speed.hardware, plain))
        if not layouts:
            rejected.append(
                Rejected(candidate=candidate_of(run, plain), reason=reason_against_asked_compiling(run, plain))
            )
            continue
        if reason := reason_against_several_stages(run, plain):
            several = candidate_of(run, replace(plain, stages_per_rank=2))
            rejected.append(Rejected(candidate=several, reason=reason))
        if closest := search.closest_misfit(layouts):
            rejected.append(closest)
        else:
            tries += search.tries(layouts)
    search.run_through(tries)
    return [with_faster_cut(plan, speed) for plan in search.kept()], rejected


_LEAST_FORWARD = 0.2
"""Smallest share of a forward pass in the time of a micro-batch: a backward pass with recomputation takes at most four
times as long as a forward pass."""


class _Try(NamedTuple):
    """A candidate that has no forecast yet."""

    bound: float
    """Lower bound on the time of a step, in seconds."""
    number: int
    """Number of the candidate. Candidates with equal bounds are tried in the order of their numbers."""
    is_second: bool
    """Whether `bound` is the second, more precise bound of the candidate."""
    layout: Layout
    training: TrainingConfig


class _PipelineSearch:
    """State of a search over layouts with a pipeline."""

    def __init__(self, run: Candidate, speed: Speed, times: list[float]) -> None:
        self.run, self.hardware, self.speed = run, speed.hardware, speed
        self.times = times
        """Seconds of a step with each layout found so far, with or without a pipeline, the fastest first."""
        self.plans: list[Plan] = []
        self._numbers = count()
        self._seconds: dict[tuple[object, ...], float] = {}
        self._ends: dict[Layout, float] = {}
        self._misfits: dict[tuple[Layout, Recompute, int], int] = {}
        """Smallest micro-batch that does not fit, keyed by layout and recomputation."""

    @property
    def limit(self) -> float:
        """Longest time of a step, in seconds, with which a layout is kept."""
        return self.times[MOST_PIPELINES - 1] if len(self.times) >= MOST_PIPELINES else float("inf")

    def kept(self) -> list[Plan]:
        """Layouts that were found and whose step is not longer than `limit`."""
        return [plan for plan in self.plans if plan.time.total <= self.limit]

    def closest_misfit(self, layouts: Sequence[Layout]) -> Rejected | None:
        """Layout that comes closest to fitting into memory; None if some layout fits.

        The search looks at 1F1B with one stage per rank, micro-batches of one sequence and all layers recomputed. No
        other settings need less memory.
        """
        *_, training = trainings(self.run, self.hardware, [1])
        plain = [each for each in layouts if each.stages_per_rank == 1 and not separates_weights(each)]
        rejected = []
        for layout in reversed(plain):
            found = forecast(candidate_of(self.run, layout, training), self.speed, with_time=False)
            if not isinstance(found, Rejected):
                return None
            rejected.append(found)
        return min(rejected, key=lambda entry: entry.needed)

    def tries(self, layouts: Iterable[Layout]) -> Iterator[_Try]:
        """All candidates with these layouts, which all have the same arrangement of ranks."""
        settings: dict[tuple[int, ...], list[TrainingConfig]] = {}
        for layout in layouts:
            micro_batches = _micro_batches(self.run, layout)
            if micro_batches not in settings:
                settings[micro_batches] = list(trainings(self.run, self.hardware, micro_batches))
            for training in settings[micro_batches]:
                yield _Try(self._bound(layout, training), next(self._numbers), False, layout, training)

    def run_through(self, tries: list[_Try]) -> None:
        """Forecast candidates in the order of their bounds, until the smallest bound exceeds the limit.

        The first bound of a candidate needs only the time of a micro-batch in the whole model. A candidate that comes
        first gets a second, higher bound, from the times of its ranks. When it comes first again, it is forecast.
        """
        heapify(tries)
        while tries and tries[0].bound <= self.limit:
            entry = heappop(tries)
            candidate = candidate_of(self.run, entry.layout, entry.training)
            if self._is_known_misfit(candidate):
                continue
            if not entry.is_second:
                bound = shortest_step(candidate, self.speed)
                heappush(tries, entry._replace(bound=max(bound, entry.bound), is_second=True))
                continue
            found = forecast(candidate, self.speed)
            if isinstance(found, Plan):
                self.plans.append(found)
                insort(self.times, found.time.total)
            else:
                self._misfits[_recomputation(candidate)] = candidate.micro_batch_size

    def _is_known_misfit(self, candidate: Candidate) -> bool:
        """Whether a micro-batch of this size or a smaller one is known not to fit with the same layout and
        recomputation.
        """
        smallest = self._misfits.get(_recomputation(candidate))
        return smallest is not None and candidate.micro_batch_size >= smallest

    def _bound(self, layout: Layout, training: TrainingConfig) -> float:
        """Lower bound on the time of a step, in seconds. The module's docstring derives it."""
        seconds, P = self._micro_batch_seconds(layout, training), layout.ranks.owners.size
        m = layout.share_of(training.batch_size) // training.micro_batch_size
        share = _LEAST_FORWARD if separates_weights(layout) else 1 / layout.stages_per_rank
        return share * seconds / (1 - (1 - share / m) ** P) + self._around(layout)

    def _around(self, layout: Layout) -> float:
        """Lower bound on the time after all passes of a step, in seconds. This time is for gradient sums and the
        optimizer. The bound assumes one stage per rank and the longest passes, with which most messages overlap.
        """
        if layout not in self._ends:
            self._ends[layout] = self._find_around(layout)
        return self._ends[layout]

    def _find_around(self, layout: Layout) -> float:
        if layout.stages_per_rank > 1:
            return self._around(replace(layout, stages_per_rank=1))
        *_, training = trainings(self.run, self.hardware, _micro_batches(self.run, layout)[-1:])
        return time_around_passes(candidate_of(self.run, layout, training), self.speed)

    def _micro_batch_seconds(self, layout: Layout, training: TrainingConfig) -> float:
        """Seconds of a micro-batch in the whole model on the tensor ranks of a layout."""
        compile_ = Compile.OFF if separates_weights(layout) else training.compile
        key = (
            layout.ranks.cuts, layout.expert, layout.sequence_parallel, compile_,
            training.recompute, training.recompute_every, training.micro_batch_size,
        )  # fmt: skip
        if key not in self._seconds:
            whole = replace(layout.without_stages(), sharding=ZeroStage.ZERO2)
            once = replace(
                training,
                compile=compile_,
                initial_batch_size=0,
                ramp_steps=0,
                batch_size=whole.ranks.batch.size * training.micro_batch_size,
            )
            (self._seconds[key],) = times_of_stages(candidate_of(self.run, whole, once), self.speed)
        return self._seconds[key]


def _layouts(run: Candidate, hardware: Hardware, plain: Layout) -> Iterator[Layout]:
    """Layouts with the arrangement of `plain`: one for each combination of options and schedules that is tried."""
    layers = run.model.num_layers
    for layout in layouts_of(run, hardware, plain):
        if layout.sharding is ZeroStage.ZERO3 or layout.shard_group or reason_against_asked_compiling(run, layout):
            continue
        yield layout
        if not reason_against_several_stages(run, plain):
            numbers = divisors(layers // plain.ranks.owners.size)[1:]
            for number in dict.fromkeys((numbers[0], numbers[-1])):
                yield replace(layout, stages_per_rank=number)
        if run.training.compile is not Compile.ON:
            yield replace(layout, schedule=PipelineSchedule.ZERO_BUBBLE)


def _micro_batches(run: Candidate, layout: Layout) -> tuple[int, ...]:
    """Micro-batch sizes that are tried with this layout."""
    each, num_ranks = layout.share_of(run.training.smallest_batch[1]), layout.ranks.owners.size
    most = max(num_ranks, MOST_PASSES // layout.num_stages)
    sizes = (micro for micro in divisors(each) if num_ranks <= each // micro <= most)
    return tuple(micro for micro in sizes if layout.stages_per_rank == 1 or each // micro % num_ranks == 0)


def _recomputation(candidate: Candidate) -> tuple[Layout, Recompute, int]:
    return candidate.layout, candidate.training.recompute, candidate.training.recompute_every
