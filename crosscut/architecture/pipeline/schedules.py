"""Schedules of pipeline stages as data: the actions of each rank, in order.

A pipeline of P ranks cuts the layers into P V stages. Rank r holds the stages r, r + P, r + 2 P and so on. V is the
number of stages per rank, and the stages of one rank are numbered by their *chunk* from 0 to V - 1. In each step, m
micro-batches run through all stages. Rank r of three, with 1F1B and m = 4 (F forward, B backward):

    rank 0    F0 F1 F2 .  .  B0 F3 .  B1 .  .  B2 .  .  B3
    rank 1       F0 F1 .  B0 F2 .  B1 F3 .  B2 .  .  B3
    rank 2          F0 B0 F1 B1 F2 B2 F3 B3

A schedule fixes only the order of the actions on each rank. An action starts as soon as the rank is free and the
action's input has arrived.

Sources: 1F1B and interleaved stages: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. Separate weight gradients:
Qi et al. 2023 (arXiv 2401.10241), schedule ZB-H1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from crosscut.config.checks import require_at_least
from crosscut.config.errors import LayoutError


class Pass(StrEnum):
    """Kind of action: a pass of one micro-batch through one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradient of the stage's input and, unless the schedule separates them, gradients of the stage's weights."""
    WEIGHTS = "W"
    """Gradients of the stage's weights, in a schedule that separates them from the backward pass."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage of a rank."""

    kind: Pass
    micro_batch: int
    chunk: int = 0
    """Index of the stage among the stages of the rank."""

    def __str__(self) -> str:
        """Action as a short text, such as `F3` or, for the second chunk of a rank, `F3.1`."""
        return f"{self.kind}{self.micro_batch}{f'.{self.chunk}' if self.chunk else ''}"


class Channel(NamedTuple):
    """One-way connection between two ranks of a pipeline. Messages arrive in the order in which they were sent."""

    sender: int
    receiver: int
    kind: Pass
    """FORWARD for activations, BACKWARD for gradients. In a pipeline of two ranks with several stages each, both kinds
    go from one rank to the other, in separate channels."""


class Message(NamedTuple):
    """Activations of a micro-batch, or their gradient, on the way from one stage to a neighbouring stage."""

    channel: Channel
    micro_batch: int
    stage: int
    """Number of the stage that receives the message, among all stages of the model."""


@dataclass(frozen=True)
class Schedule:
    """Order of the actions of all ranks of a pipeline in one step."""

    num_ranks: int
    """Number of ranks P."""
    num_chunks: int
    """Number of stages per rank V."""
    num_micro_batches: int
    """Number of micro-batches m of the step."""
    actions: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in the order in which the rank performs them."""

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks together."""
        return self.num_ranks * self.num_chunks

    def __hash__(self) -> int:
        """Hash of the sizes, so that a cache does not read all actions."""
        return hash((self.num_ranks, self.num_chunks, self.num_micro_batches))

    @cached_property
    def separates_weights(self) -> bool:
        """Whether the gradients of weights are actions of their own."""
        return any(action.kind is Pass.WEIGHTS for actions in self.actions for action in actions)

    def stage_of(self, rank: int, action: Action) -> int:
        """Number of an action's stage among all stages of the model, from 0."""
        return action.chunk * self.num_ranks + rank

    def received(self, rank: int, action: Action) -> Message | None:
        """Message that a rank needs to start an action; None if the action needs no message."""
        if action.kind is Pass.WEIGHTS:
            return None
        stage = self.stage_of(rank, action)
        before = stage - 1 if action.kind is Pass.FORWARD else stage + 1
        return self._message(before, stage, action)

    def sent(self, rank: int, action: Action) -> Message | None:
        """Message with the result of an action; None if no other rank needs the result."""
        if action.kind is Pass.WEIGHTS:
            return None
        stage = self.stage_of(rank, action)
        after = stage + 1 if action.kind is Pass.FORWARD else stage - 1
        return self._message(stage, after, action)

    def _message(self, sender: int, receiver: int, action: Action) -> Message | None:
        if self.num_ranks == 1 or min(sender, receiver) < 0 or max(sender, receiver) == self.num_stages:
            return None
        channel = Channel(sender % self.num_ranks, receiver % self.num_ranks, action.kind)
        return Message(channel, action.micro_batch, receiver)

    def messages(self) -> Iterator[Message]:
        """Yield all messages of the step, rank by rank, in the order in which each rank sends them."""
        for rank, actions in enumerate(self.actions):
            yield from (message for action in actions if (message := self.sent(rank, action)) is not None)

    def acknowledged(self, rank: int) -> dict[Message, tuple[Message, ...]]:
        """For each message that `rank` receives: the messages that `rank` sent before and that must have arrived.

        The sender of a message has received everything that its earlier actions needed, so `rank` may free what it sent
        for these actions. A message whose arrival no later message proves is left out.
        """
        found: dict[Message, tuple[Message, ...]] = {}
        for sender, actions in enumerate(self.actions):
            arrived: list[Message] = []
            for action in actions:
                received, sent = self.received(sender, action), self.sent(sender, action)
                if received is not None and received.channel.sender == rank:
                    arrived.append(received)
                if sent is not None and sent.channel.receiver == rank:
                    found[sent], arrived = tuple(arrived), []
        return found

    def num_in_flight(self, rank: int) -> int:
        """Largest number of micro-batches whose activations a rank holds at once, counted once per stage of the rank.

        The activations are held from the forward pass to the backward pass, or, if the gradients of weights are
        separate, to the gradients of the weights.
        """
        last = Pass.WEIGHTS if self.separates_weights else Pass.BACKWARD
        held = most = 0
        for action in self.actions[rank]:
            held += (action.kind is Pass.FORWARD) - (action.kind is last)
            most = max(most, held)
        return most


@lru_cache(maxsize=256)
def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule 1F1B for one stage per rank.

    Rank r starts with P - r - 1 forward passes, and then alternates one forward and one backward pass. The rank
    therefore holds the activations of at most P - r micro-batches. The waiting time is (P - 1) / m of the computing
    time.
    """
    return interleaved(num_ranks, num_micro_batches, 1)


@lru_cache(maxsize=256)
def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Return the schedule 1F1B for several stages per rank.

    Groups of P micro-batches run through one stage of a rank after the other. Rank r starts with 2 (P - r - 1) +
    (V - 1) P forward passes, and then alternates. The waiting time is (P - 1) / (V m) of the computing time. Raises
    `LayoutError` if V is above 1 and P does not divide m.
    """
    _require_sizes(num_ranks, num_micro_batches, num_chunks)
    if num_chunks > 1 and num_micro_batches % num_ranks:
        raise LayoutError(
            f"The number of micro-batches must be a multiple of the number of ranks of the pipeline ({num_ranks}) "
            f"with several stages per rank, but is {num_micro_batches}."
        )
    total = num_micro_batches * num_chunks
    ranks = []
    for rank in range(num_ranks):
        ahead = (num_ranks - rank - 1) * (1 if num_chunks == 1 else 2) + (num_chunks - 1) * num_ranks
        ahead = min(total, ahead)
        forward = [_nth(Pass.FORWARD, n, num_ranks, num_chunks) for n in range(total)]
        backward = [_nth(Pass.BACKWARD, n, num_ranks, num_chunks) for n in range(total)]
        pairs = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
        ranks.append((*forward[:ahead], *pairs, *backward[total - ahead :]))
    return Schedule(num_ranks, num_chunks, num_micro_batches, tuple(ranks))


def _nth(kind: Pass, number: int, num_ranks: int, num_chunks: int) -> Action:
    """Forward or backward pass number `number` of a rank. Backward passes start with the last chunk."""
    if num_chunks == 1:
        return Action(kind, number)
    group, place = divmod(number, num_ranks * num_chunks)
    chunk, index = divmod(place, num_ranks)
    chunk = chunk if kind is Pass.FORWARD else num_chunks - 1 - chunk
    return Action(kind, group * num_ranks + index, chunk)


@lru_cache(maxsize=256)
def zero_bubble(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule ZB-H1: 1F1B in which the gradients of weights are separate actions.

    Rank r delays the gradients of weights by r micro-batches. At the end of the step, where 1F1B waits for the next
    backward pass, the rank computes the delayed gradients. Every rank holds the activations of at most P micro-batches,
    as the first rank does under 1F1B. With f, b and w for the times of a forward pass, of the gradient of the input and
    of the gradients of the weights, the waiting time is (P - 1)(f + b - w), instead of (P - 1)(f + b + w).
    """
    base = one_forward_one_backward(num_ranks, num_micro_batches)
    ranks = []
    for rank, actions in enumerate(base.actions):
        own: list[Action] = []
        for action in actions:
            own.append(action)
            if action.kind is Pass.BACKWARD and action.micro_batch >= rank:
                own.append(Action(Pass.WEIGHTS, action.micro_batch - rank))
        delayed = range(max(0, num_micro_batches - rank), num_micro_batches)
        ranks.append((*own, *(Action(Pass.WEIGHTS, index) for index in delayed)))
    return Schedule(num_ranks, 1, num_micro_batches, tuple(ranks))


def _require_sizes(num_ranks: int, num_micro_batches: int, num_chunks: int) -> None:
    require_at_least("num_ranks", num_ranks, 1)
    require_at_least("num_micro_batches", num_micro_batches, 1)
    require_at_least("num_chunks", num_chunks, 1)
