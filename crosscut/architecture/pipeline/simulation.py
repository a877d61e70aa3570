"""Simulation of a schedule: the start and the end of each action, and the time that ranks wait.

The simulation needs only the durations of the actions. Every rank performs its actions in order. An action with an
input from another rank starts after the input has arrived. A rank sends a result and goes on without waiting for the
receiver.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from crosscut.architecture.pipeline.schedules import Action, Channel, Message, Pass, Schedule
from crosscut.config.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Time of each kind of action for one stage, in any unit, and time of a message."""

    forward: float = 1.0
    backward: float = 2.0
    """Time of a backward pass, without the gradients of the weights if the schedule separates them."""
    weights: float = 0.0
    """Time of the gradients of the weights, if the schedule separates them."""
    message: float = 0.0

    def of(self, kind: Pass) -> float:
        """Time of an action of this kind."""
        return {Pass.FORWARD: self.forward, Pass.BACKWARD: self.backward, Pass.WEIGHTS: self.weights}[kind]


class Timed(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Times of all actions of a schedule."""

    schedule: Schedule
    ranks: tuple[tuple[Timed, ...], ...]
    """Actions of each rank in order, with their times."""

    @property
    def total(self) -> float:
        """Time from the start of the step to the end of the last action of any rank."""
        return max(timed[-1].end for timed in self.ranks)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(timed.end - timed.start for timed in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Waiting time as a share of the computing time, for the rank that computes longest."""
        longest = max(self.busy(rank) for rank in range(self.schedule.num_ranks))
        return (self.total - longest) / longest


def simulate(schedule: Schedule, durations: Durations | list[Durations]) -> Simulation:
    """Simulate a schedule. `durations` is one object for all stages, or a list with one object for each stage of the
    model, in order.

    Raises `LayoutError` if ranks would wait for each other forever, or if a channel would deliver messages in another
    order than the receiver needs.
    """
    each = [durations] * schedule.num_stages if isinstance(durations, Durations) else durations
    run = _Run(schedule, each)
    while run.advance():
        pass
    if any(run.waiting):
        rank = next(rank for rank, actions in enumerate(run.waiting) if actions)
        raise LayoutError(
            f"Every action of a schedule must receive its input, but rank {rank} waits forever before "
            f"{run.waiting[rank][0]}. Change the order of the actions."
        )
    return Simulation(schedule, tuple(map(tuple, run.done)))


class _Run:
    """State of a simulation."""

    def __init__(self, schedule: Schedule, durations: list[Durations]) -> None:
        self.schedule, self.durations = schedule, durations
        self.waiting = [deque(actions) for actions in schedule.actions]
        self.done: list[list[Timed]] = [[] for _ in schedule.actions]
        self.channels: dict[Channel, deque[tuple[Message, float]]] = {}
        self.inputs: dict[tuple[int, int, Pass], float] = {}
        """End of each pass of a micro-batch through a stage, which a later pass of the same stage needs."""

    def advance(self) -> bool:
        """Let each rank perform its next action, if the action's input has been sent. Return whether any rank performed
        an action.
        """
        return sum(self._perform(rank) for rank in range(self.schedule.num_ranks)) > 0

    def _perform(self, rank: int) -> bool:
        if not self.waiting[rank]:
            return False
        action = self.waiting[rank][0]
        ready = self._ready(rank, action)
        if ready is None:
            return False
        self.waiting[rank].popleft()
        stage, timed = self.schedule.stage_of(rank, action), self.done[rank]
        start = max(ready, timed[-1].end if timed else 0.0)
        end = start + self.durations[stage].of(action.kind)
        timed.append(Timed(action, start, end))
        self.inputs[stage, action.micro_batch, action.kind] = end
        if (message := self.schedule.sent(rank, action)) is not None:
            arrival = end + self.durations[stage].message
            self.channels.setdefault(message.channel, deque()).append((message, arrival))
        return True

    def _ready(self, rank: int, action: Action) -> float | None:
        """Time at which the input of an action is there; None if it has not been sent yet."""
        stage = self.schedule.stage_of(rank, action)
        earlier = {Pass.BACKWARD: Pass.FORWARD, Pass.WEIGHTS: Pass.BACKWARD}.get(action.kind)
        own = 0.0 if earlier is None else self.inputs.get((stage, action.micro_batch, earlier))
        needed = self.schedule.received(rank, action)
        if needed is None or own is None:
            return own
        arrived = self.channels.get(needed.channel)
        if not arrived:
            return None
        if arrived[0][0] != needed:
            raise LayoutError(
                f"Rank {rank} must receive messages in the order in which rank {needed.channel.sender} sends them, but "
                f"needs micro-batch {needed.micro_batch} of stage {needed.stage} before micro-batch "
                f"{arrived[0][0].micro_batch} of stage {arrived[0][0].stage}. Change the order of the actions."
            )
        return max(own, arrived.popleft()[1])
