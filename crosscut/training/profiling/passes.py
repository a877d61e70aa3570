"""Record of the passes of pipeline stages in a run, and the shares of a step's time that follow from this record.

Each rank records when its forward passes, backward passes and deferred weight gradients start and end. A pass starts
when its input has arrived, and ends before its result is sent. On a GPU, the times are those of the device.

The records of all ranks of a pipeline give four shares of a step's time, which add up to 1 on each rank:

    computing = passes    bubble = T0 - passes    waiting = T - T0    rest = step - T

T is the time from the start of the first pass to the end of the last pass of all ranks. T0 is what T would be if
messages took no time and no rank paused between two passes (`architecture.pipeline.without_messages`). The rest of a
step is spent on counting the targets, summing the gradients and running the optimizer.
"""

import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from crosscut.architecture.pipeline import Action, Schedule, Timed, Timeline, without_messages
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import from_all_ranks
from crosscut.training.result import Moment
from crosscut.training.watching.throughput import synchronize


class RankPasses(NamedTuple):
    """Passes of one rank in one step."""

    line: tuple[int, ...]
    """Positions of the rank along all axes except `pipeline`. All ranks of one pipeline have the same positions."""
    rank: int
    """Position of the rank along the pipeline."""
    host: str
    """Name of the rank's machine."""
    began: float
    """Time on the machine's clock at which the step began, in seconds."""
    seconds: float
    """Seconds of the step."""
    passes: tuple[Timed, ...]
    """Passes of the rank in order, in seconds since `began`."""


class PassRecorder:
    """Recorder of the passes of one rank, an `Observer` of `model.stages`. Every rank must record the same steps.

    trainer.observer = recorder = PassRecorder(mesh)
    with recorder.step():
        trainer.step(step, micro_batches)
    recorder.recorded()
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        """The pipeline of `mesh` must have several ranks."""
        assert mesh.is_staged, "the pipeline has one rank"
        self.mesh, self._pipeline = mesh, mesh.pipeline
        self._began = self._ended = Moment(mesh.device)
        self._passes: list[tuple[Action, Moment, Moment, int]] = []
        self._open: tuple[Moment, torch.profiler.record_function] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context in which the caller runs one step. The context waits for all ranks before the step, and for the
        device of this rank before and after the step.
        """
        self._passes = []
        synchronize(self.mesh.device)
        from_all_ranks(None, self.mesh)
        self._began = Moment(self.mesh.device)
        yield
        self._ended = Moment(self.mesh.device)
        synchronize(self.mesh.device)

    def start(self, action: Action) -> None:
        """Record the start of an action. The trace of a profiler shows the action under its name, such as `pass F3`."""
        named = torch.profiler.record_function(f"pass {action}")
        named.__enter__()
        self._open = Moment(self.mesh.device), named

    def end(self, action: Action, *, weight_gradients: int) -> None:
        """Record the end of the action that was started last."""
        assert self._open is not None, "no action was started"
        (start, named), self._open = self._open, None
        self._passes.append((action, start, Moment(self.mesh.device), weight_gradients))
        named.__exit__(None, None, None)

    def recorded(self) -> RankPasses:
        """Return the passes of the last step that ran inside `step`."""
        passes = (
            Timed(action, self._began.seconds_to(start), self._began.seconds_to(end), computed)
            for action, start, end, computed in self._passes
        )
        return RankPasses(
            line=tuple(axis.rank for axis in self.mesh.axes if axis is not self._pipeline),
            rank=self._pipeline.rank,
            host=platform.node(),
            began=self._began.on_host,
            seconds=self._began.seconds_to(self._ended),
            passes=tuple(passes),
        )


class PassShares(NamedTuple):
    """Shares of a step on one rank of a pipeline, as fractions of the rank's step. They add up to 1."""

    computing: float
    """Passes, including the messages between tensor and context ranks during the passes."""
    bubble: float
    """Idle time that follows from the schedule and from the times of the passes."""
    waiting: float
    """Idle time for messages between stages, and pauses between passes."""
    rest: float
    """Time before the first pass and after the last pass of all ranks of the pipeline."""


class PipelineStep(NamedTuple):
    """A recorded step of one pipeline."""

    timeline: Timeline
    """Passes of all ranks. Times are in seconds since the step began on the rank that began first."""
    seconds: tuple[float, ...]
    """For each rank, seconds from the time 0 of `timeline` to the end of the rank's step."""

    def shares(self) -> list[PassShares]:
        """Return the shares of the step on each rank."""
        bare, total = without_messages(self.timeline).total, self.timeline.total
        return [
            PassShares(
                computing=self.timeline.busy(rank) / step,
                bubble=(bare - self.timeline.busy(rank)) / step,
                waiting=(total - bare) / step,
                rest=1.0 - total / step,
            )
            for rank, step in enumerate(self.seconds)
        ]


def pipeline_steps(schedule: Schedule, gathered: Sequence[RankPasses]) -> list[PipelineStep]:
    """Join the passes of all ranks in one step into one `PipelineStep` per pipeline of the layout.

    Ranks on one machine share a clock. The clocks of different machines are aligned at the start of the step, before
    which all ranks wait for each other.
    """
    lines: dict[tuple[int, ...], list[RankPasses]] = defaultdict(list)
    for passes in sorted(gathered):
        lines[passes.line].append(passes)
    return [_joined(schedule, ranks) for ranks in lines.values()]


def _joined(schedule: Schedule, ranks: Sequence[RankPasses]) -> PipelineStep:
    first: dict[str, float] = {}
    for of_rank in ranks:
        first[of_rank.host] = min(of_rank.began, first.get(of_rank.host, of_rank.began))
    shifts = [of_rank.began - first[of_rank.host] for of_rank in ranks]
    moved = [
        tuple(timed._replace(start=timed.start + shift, end=timed.end + shift) for timed in of_rank.passes)
        for of_rank, shift in zip(ranks, shifts, strict=True)
    ]
    timeline = Timeline(schedule, tuple(moved))
    timeline.require_complete()
    return PipelineStep(timeline, tuple(of_rank.seconds + shift for of_rank, shift in zip(ranks, shifts, strict=True)))
