"""Plan of the messages with which ranks fetch the positions that their outputs read. This module imports no torch.

    rank 0 holds     |-------|                    outputs of rank 1 read  ....|----------|....
    rank 1 holds             |-------|            overlap with rank 0         |--|
    rank 2 holds                     |-------|    overlap with rank 2                 |--|

A rank sends another rank the overlap of the positions that it holds and the positions that the other rank reads. The
overlap may be empty, and it may be with ranks that are no neighbours: halos can be wider than a part, and parts can be
empty. The gradients take the same ways back, and are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from crosscut.config import LayoutError
from crosscut.parallel.spatial.reaches import Reach
from crosscut.parallel.spatial.spans import NOTHING, Range, Span, Wanted, wanted

DIRECTIONS = ("depth", "height", "width")
"""Names of the directions of an image, and of the axes along which ranks share it. Images of fewer directions have the
last ones.
"""


@dataclass(frozen=True)
class ExchangePlan:
    """Positions of one direction that ranks hold, and positions that they fetch."""

    held: Span
    wants: tuple[Wanted, ...]
    """Positions that each rank fetches."""

    def pieces(self, giver: int, taker: int) -> tuple[Range, ...]:
        """Return the positions that `giver` has of the three ranges that `taker` fetches."""
        part = self.held.part(giver)
        return tuple(part.overlap(each) for each in self.wants[taker][:3])

    def rows(self, giver: int, taker: int) -> int:
        """Return the number of positions that `taker` fetches from `giver`."""
        return sum(piece.size for piece in self.pieces(giver, taker))

    @cached_property
    def sends(self) -> bool:
        """Whether any rank fetches positions that another rank holds."""
        ranks = range(self.held.num_ranks)
        return any(self.rows(giver, taker) for giver in ranks for taker in ranks if giver != taker)


class Step(NamedTuple):
    """One direction of an operator on a divided image."""

    exchange: ExchangePlan
    outputs: Span
    """Outputs that each rank computes."""
    reads: tuple[Range, ...]
    """Positions that the outputs of each rank read, also outside the image."""


@lru_cache(maxsize=4096)
def plan_step(held: Span, reach: Reach, mode: str = "zeros") -> Step:
    """Plan one direction of an operator. Raises `LayoutError` if the operator has no outputs."""
    length = reach.length(held.size)
    if length < 1:
        raise LayoutError(
            f"An image must be as large as the window of a layer, but has only {held.size} positions for {reach}. Use "
            "a larger image, more padding or a smaller kernel."
        )
    outputs = held.resized(length)
    parts = map(outputs.part, range(outputs.num_ranks))
    reads = tuple(reach.reads(part) if part.size else NOTHING for part in parts)
    return Step(ExchangePlan(held, tuple(wanted(each, held.size, mode) for each in reads)), outputs, reads)


def plan_move(held: Span, to: Span) -> ExchangePlan:
    """Plan the messages that divide an image anew."""
    parts = map(to.part, range(to.num_ranks))
    return ExchangePlan(held, tuple(Wanted(NOTHING, part, NOTHING) for part in parts))


def plan_gather(held: Span) -> ExchangePlan:
    """Plan the messages that give every rank all positions."""
    return ExchangePlan(held, (Wanted(NOTHING, Range(0, held.size), NOTHING),) * held.num_ranks)


class Message(NamedTuple):
    """One message of a rank to another rank of an axis."""

    axis: str
    """Name of the direction."""
    receiver: int
    """Position of the other rank along the axis."""
    elements: int


class HaloMessages(NamedTuple):
    """Messages that one rank sends for one operator."""

    forward: list[Message]
    backward: list[Message]


def halo_messages(steps: Sequence[Step], place: Sequence[int], leading: int) -> HaloMessages:
    """List the messages that a rank sends for an operator, in the order in which it sends them.

    `steps` has one `plan_step` per direction, `place` the rank's position along each axis, and `leading` is the number
    of images times channels. The directions follow one another, so each one sends the halos of those before it: in two
    messages, corners come from ranks that are neighbours of neighbours.
    """
    names = DIRECTIONS[-len(steps) :]
    shape = [step.exchange.held.part(rank).size for step, rank in zip(steps, place, strict=True)]
    forward: list[Message] = []
    backward: list[Message] = []
    for i, (step, rank) in enumerate(zip(steps, place, strict=True)):
        plan, row = step.exchange, leading * prod(shape[:i] + shape[i + 1 :])
        others = [other for other in range(plan.held.num_ranks) if other != rank]
        to = [Message(names[i], other, plan.rows(rank, other) * row) for other in others]
        back = [Message(names[i], other, plan.rows(other, rank) * row) for other in others]
        forward += [message for message in to if message.elements]
        backward = [message for message in back if message.elements] + backward
        want = plan.wants[rank]
        shape[i] = want.inside.size + want.num_before + want.num_after
    return HaloMessages(forward, backward)
