"""Simulation of a schedule: the start and the end of each action, and the time that ranks wait.

The simulation needs only the durations of the actions. Every rank performs its actions in order. An action with an
input from another rank starts after the input has arrived. A rank sends a result and goes on without waiting for the
receiver.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crosscut.architecture.pipeline.schedules import Channel, Message, Pass, Schedule
from crosscut.architecture.pipeline.timeline import Timed, Timeline
from crosscut.config.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Times for one stage, in any unit: of each kind of action, and of a message."""

    forward: float = 1.0
    backward: float = 2.0
    """Time of a backward pass. It excludes the weight gradients if the schedule computes them separately."""
    weights: float = 0.0
    """Time of the weight gradients, if the schedule computes them separately."""
    message: float = 0.0

    def of(self, kind: Pass) -> float:
        """Time of an action of this kind."""
        return {Pass.FORWARD: self.forward, Pass.BACKWARD: self.backward, Pass.WEIGHTS: self.weights}[kind]


def simulate(schedule: Schedule, durations: Durations | Sequence[Durations]) -> Timeline:
    """Simulate a schedule. `durations` is one object for all stages, or a sequence with one object for each stage of
    the model, in order. The first action starts at 0.

    Raises `LayoutError` if ranks would wait for each other forever, or if a channel would deliver messages in an order
    that differs from the order in which the receiver needs them.
    """
    return _timeline(schedule, *_seconds(schedule, durations))


def without_messages(recorded: Timeline) -> Timeline:
    """Return the timeline that a recorded step would have had if messages took no time: each action takes as long as in
    the record, and starts as soon as the rank is free and the action's input has been computed.

    The idle time in the result is the bubble: it follows only from the schedule and from the durations of the actions.
    The total of `recorded` minus the total of the result is the time that the step has waited for messages.
    """
    schedule = recorded.schedule
    own = [iter(rank) for rank in recorded.ranks]
    seconds = [next(own[step.rank]).duration for step in _order(schedule)]
    return _timeline(schedule, seconds, [0.0] * schedule.num_stages)


def ends_of_ranks(schedule: Schedule, durations: Durations | Sequence[Durations]) -> list[float]:
    """Return the time at which each rank ends its last action. The times equal those of `simulate`, but no timeline of
    all actions is built.
    """
    ends = [0.0] * schedule.num_ranks
    for step, end in zip(_order(schedule), _times(schedule, *_seconds(schedule, durations))[1], strict=True):
        ends[step.rank] = end
    return ends


def _seconds(schedule: Schedule, durations: Durations | Sequence[Durations]) -> tuple[list[float], list[float]]:
    """Return the time of each action, in the order of `_order`, and the time of a message from each stage."""
    each = [durations] * schedule.num_stages if isinstance(durations, Durations) else durations
    seconds = {(stage, kind): each[stage].of(kind) for stage in range(schedule.num_stages) for kind in Pass}
    return [seconds[step.stage, step.kind] for step in _order(schedule)], [durations.message for durations in each]


def _timeline(schedule: Schedule, seconds: Sequence[float], messages: Sequence[float]) -> Timeline:
    """Return the timeline of a schedule whose actions and messages take the times `seconds` and `messages`, which are
    ordered as in `_seconds`.
    """
    ranks: list[list[Timed]] = [[] for _ in schedule.actions]
    for step, start, end in zip(_order(schedule), *_times(schedule, seconds, messages), strict=True):
        done = ranks[step.rank]
        done.append(Timed(schedule.actions[step.rank][len(done)], start, end))
    return Timeline(schedule, tuple(map(tuple, ranks)))


def _times(schedule: Schedule, seconds: Sequence[float], messages: Sequence[float]) -> tuple[list[float], list[float]]:
    """Start and end of each action, in the order of `_order`."""
    free = [0.0] * schedule.num_ranks
    starts: list[float] = []
    ends: list[float] = []
    for (rank, _, _, own, sent, sender), taken in zip(_order(schedule), seconds, strict=True):
        start = free[rank]
        if own is not None and ends[own] > start:
            start = ends[own]
        if sent is not None and ends[sent] + messages[sender] > start:
            start = ends[sent] + messages[sender]
        end = free[rank] = start + taken
        starts.append(start)
        ends.append(end)
    return starts, ends


class _Ordered(NamedTuple):
    """An action, with the numbers of the actions whose results it needs. Actions are numbered such that each action
    comes after the actions that it needs.
    """

    rank: int
    stage: int
    kind: Pass
    own: int | None
    """Number of the earlier pass of the same micro-batch through the same stage. None for a forward pass, which needs
    no earlier pass."""
    sent: int | None
    """Number of the action that sends the input from another rank. None if no other rank sends the input."""
    sender: int
    """Stage of the action that sends the input."""


@lru_cache(maxsize=32)
def _order(schedule: Schedule) -> tuple[_Ordered, ...]:
    """Actions of all ranks in an order in which they can run. Raises `LayoutError` if there is no such order."""
    run = _Run(schedule)
    while run.advance():
        pass
    if any(run.waiting):
        rank = next(rank for rank, actions in enumerate(run.waiting) if actions)
        raise LayoutError(
            f"Every action of a schedule must receive its input, but rank {rank} waits forever before "
            f"{run.waiting[rank][0]}. Change the order of the actions."
        )
    return tuple(run.done)


_EARLIER = {Pass.BACKWARD: Pass.FORWARD, Pass.WEIGHTS: Pass.BACKWARD}


class _Run:
    """Trial run of a schedule. It ignores durations and only finds an order in which all actions can be performed."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.waiting = [deque(actions) for actions in schedule.actions]
        self.done: list[_Ordered] = []
        self.channels: dict[Channel, deque[tuple[Message, int, int]]] = {}
        """Messages on the way, with the number and the stage of the action that sent each message."""
        self.numbers: dict[tuple[int, int, Pass], int] = {}
        """Number of each performed pass, keyed by stage, micro-batch and kind of pass. A later pass through the same
        stage needs this number."""

    def advance(self) -> bool:
        """Let each rank perform its actions until it needs an input that has not been sent. Return whether any rank
        performed an action.
        """
        before = len(self.done)
        for rank in range(self.schedule.num_ranks):
            while self.waiting[rank] and self._perform(rank):
                pass
        return len(self.done) > before

    def _perform(self, rank: int) -> bool:
        """Perform the next action of a rank if its input has been sent. Return whether the rank performed it."""
        action = self.waiting[rank][0]
        stage = self.schedule.stage_of(rank, action)
        own = None
        if action.kind in _EARLIER:
            own = self.numbers.get((stage, action.micro_batch, _EARLIER[action.kind]))
            if own is None:
                return False
        sent, sender = None, stage
        if (needed := self.schedule.received(rank, action)) is not None:
            if not (arrived := self.channels.get(needed.channel)):
                return False
            _require_order(rank, needed, arrived[0][0])
            _, sent, sender = arrived.popleft()
        self.waiting[rank].popleft()
        self.numbers[stage, action.micro_batch, action.kind] = number = len(self.done)
        self.done.append(_Ordered(rank, stage, action.kind, own, sent, sender))
        if (message := self.schedule.sent(rank, action)) is not None:
            self.channels.setdefault(message.channel, deque()).append((message, number, stage))
        return True


def _require_order(rank: int, needed: Message, arrived: Message) -> None:
    """Raise `LayoutError` unless the message that a rank needs is the first one that arrives."""
    if arrived != needed:
        raise LayoutError(
            f"Rank {rank} must receive messages in the order in which rank {needed.channel.sender} sends them, but "
            f"needs micro-batch {needed.micro_batch} of stage {needed.stage} before micro-batch "
            f"{arrived.micro_batch} of stage {arrived.stage}. Change the order of the actions."
        )
