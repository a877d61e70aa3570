"""Schedules of pipeline stages as data: the actions of each rank, in order.

A pipeline of P ranks cuts the layers into P V stages. Rank r holds the stages r, r + P, r + 2 P and so on. V is the
number of stages per rank. The stages of one rank are numbered from 0 to V - 1, and this number is the *chunk*. In each
step, m micro-batches run through all stages. For example, 1F1B on three ranks with m = 4 (F forward, B backward):

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
    """Gradient of the stage's input. Also the gradients of the stage's weights, unless the schedule computes them
    separately."""
    WEIGHTS = "W"
    """Gradients of the stage's weights, in a schedule that computes them separately from the backward pass."""


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
    """Actions of all ranks of a pipeline in one step, in order."""

    num_ranks: int
    """Number P of ranks."""
    num_chunks: int
    """Number V of stages per rank."""
    num_micro_batches: int
    """Number m of micro-batches in the step."""
    actions: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in the order in which the rank performs them."""

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks together."""
        return self.num_ranks * self.num_chunks

    def __hash__(self) -> int:
        """Return a hash of the sizes only, so that a cache look-up does not have to hash all actions."""
        return hash((self.num_ranks, self.num_chunks, self.num_micro_batches))

    @cached_property
    def separates_weights(self) -> bool:
        """Whether weight gradients are computed in separate actions, after the backward pass."""
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
        """Map each message that `rank` receives to the earlier messages of `rank` that the received message
        acknowledges.

        Before another rank sends a message, it has received all inputs of its actions so far. When this message
        arrives, `rank` may therefore free the tensors that it sent as these inputs. Each message of `rank` is listed
        only once, under the first message that acknowledges it. A message of `rank` that is never acknowledged is left
        out.
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
        """Largest number of micro-batches whose activations a rank holds at once. A micro-batch counts once for each of
        the rank's stages that hold its activations.

        The rank holds the activations from the forward pass to the backward pass. If the schedule computes weight
        gradients separately, the rank holds the activations until the weight gradients are computed.
        """
        last = Pass.WEIGHTS if self.separates_weights else Pass.BACKWARD
        held = most = 0
        for action in self.actions[rank]:
            held += (action.kind is Pass.FORWARD) - (action.kind is last)
            most = max(most, held)
        return most


@lru_cache(maxsize=256)
def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule 1F1B for P ranks with one stage each, and m micro-batches.

    Rank r starts with P - r - 1 forward passes, and then alternates one forward and one backward pass. The rank
    therefore holds the activations of at most P - r micro-batches. The waiting time is (P - 1) / m of the computing
    time.
    """
    return interleaved(num_ranks, num_micro_batches, 1)


@lru_cache(maxsize=256)
def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Return the schedule 1F1B for P ranks with V stages each (`num_chunks`), and m micro-batches.

    Each group of P micro-batches runs through the first stage of a rank, then through the rank's next stage, and so on.
    Rank r starts with 2 (P - r - 1) + (V - 1) P forward passes, and then alternates one forward and one backward pass.
    The waiting time is (P - 1) / (V m) of the computing time. Raises `LayoutError` if V is above 1 and P does not
    divide m.
    """
    _require_sizes(num_ranks, num_micro_batches, num_chunks)
    if num_chunks > 1 and num_micro_batches % num_ranks:
        raise LayoutError(
            f"With several stages per rank, the number of micro-batches must be a multiple of the number of pipeline "
            f"ranks ({num_ranks}), but is {num_micro_batches}."
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
    """Return a rank's forward or backward pass with the index `number`, from 0. Backward passes start with the last
    chunk.
    """
    if num_chunks == 1:
        return Action(kind, number)
    group, place = divmod(number, num_ranks * num_chunks)
    chunk, index = divmod(place, num_ranks)
    chunk = chunk if kind is Pass.FORWARD else num_chunks - 1 - chunk
    return Action(kind, group * num_ranks + index, chunk)


@lru_cache(maxsize=256)
def zero_bubble(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule ZB-H1 for P ranks: 1F1B, but weight gradients are separate actions.

    Rank r delays the weight gradients by r micro-batches. At the end of the step, where 1F1B waits for the next
    backward pass, the rank computes the delayed gradients. Every rank holds the activations of at most P micro-batches,
    as the first rank does under 1F1B. Let f, b and w be the times of a forward pass, of the gradient of the input and
    of the weight gradients. The waiting time is then (P - 1)(f + b - w), while it is (P - 1)(f + b + w) under 1F1B.
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
