"""Times of all actions of a step, either simulated or recorded by the ranks of a run."""

from dataclasses import dataclass
from typing import NamedTuple

from crosscut.architecture.pipeline.schedules import Action, Schedule


class Timed(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float
    weight_gradients: int = 0
    """Number of deferred weight gradients that the action has computed. 0 in a simulation, and for actions that are not
    of the kind `Pass.WEIGHTS`."""

    @property
    def duration(self) -> float:
        """Time between the start and the end."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Times of all actions of a schedule. The times of all ranks count from the same moment, in the same unit."""

    schedule: Schedule
    ranks: tuple[tuple[Timed, ...], ...]
    """Actions of each rank in order, with their times."""

    @property
    def total(self) -> float:
        """Time from the start of the first action of any rank to the end of the last action of any rank."""
        return max(timed[-1].end for timed in self.ranks) - min(timed[0].start for timed in self.ranks)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(timed.duration for timed in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Ratio of idle time to computing time, for the rank that computes longest."""
        longest = max(self.busy(rank) for rank in range(self.schedule.num_ranks))
        return (self.total - longest) / longest

    @property
    def mean_bubble(self) -> float:
        """Ratio of the idle time of all ranks to the computing time of all ranks. If all ranks compute for the same
        time, the result equals `bubble`.
        """
        busy = sum(self.busy(rank) for rank in range(self.schedule.num_ranks))
        return (self.total * self.schedule.num_ranks - busy) / busy

    def require_complete(self) -> None:
        """Raise `AssertionError` unless each rank has performed exactly the actions of the schedule, in order. Only a
        bug can cause this error.
        """
        done = tuple(tuple(timed.action for timed in rank) for rank in self.ranks)
        assert done == self.schedule.actions, "the actions that a rank has recorded differ from the schedule"
