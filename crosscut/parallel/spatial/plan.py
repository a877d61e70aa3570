"""Plan of the messages with which ranks fetch the positions that their outputs read. This module imports no torch.

The plan of an operator follows from its reach: a rank fetches the positions that its outputs read (`exchange.plan`).
Halos can be wider than a part, and parts can be empty. The gradients take the same ways back, and are added.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from crosscut.config import LayoutError
from crosscut.parallel.exchange.plan import ExchangePlan, Range
from crosscut.parallel.spatial.reaches import Listed, Reach
from crosscut.parallel.spatial.spans import NOTHING, Span, Wanted, wanted

DIRECTIONS = ("depth", "height", "width")
"""Names of the directions of an image, and of the axes along which ranks share it. Images of fewer directions have the
last ones.
"""


class Step(NamedTuple):
    """One direction of an operator on a divided image."""

    held: Span
    """Positions that each rank holds."""
    wants: tuple[Wanted, ...]
    """Positions that each rank copies, with padding."""
    exchange: ExchangePlan
    """Messages with which the ranks fetch the positions."""
    outputs: Span
    """Outputs that each rank computes."""
    reads: tuple[Range, ...]
    """Positions that each rank reads, also outside the image."""
    sums: ExchangePlan | None = None
    """Messages with terms of the outputs, if each rank reads only its own positions. The ranks of the outputs add them.
    """

    def results(self, rank: int) -> Range:
        """Return the outputs, or the outputs' terms, that a rank computes."""
        if self.sums is None:
            return self.outputs.part(rank)
        return next(iter(self.sums.wants[rank]), NOTHING)


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
    wants = tuple(wanted(each, held.size, mode) for each in reads)
    return Step(held, wants, plan_exchange(held, [want[:3] for want in wants]), outputs, reads)


@lru_cache(maxsize=4096)
def plan_linear_step(held: Span, reach: Listed) -> Step:
    """Plan one direction of an operator whose outputs are sums over the inputs that they read: ranks fetch inputs, as
    for an operator of any kind, or send terms of the outputs, if these are fewer. An average over the whole image needs
    one term.
    """
    step = plan_step(held, reach)
    parts = [held.part(rank) for rank in range(held.num_ranks)]
    terms = [[reach.read_by(part)] for part in parts]
    sums = plan_exchange(step.outputs, terms)
    if sums.sent >= step.exchange.sent:
        return step
    wants = tuple(Wanted(NOTHING, part, NOTHING) for part in parts)
    return Step(held, wants, plan_move(held, held), step.outputs, tuple(parts), sums)


def plan_exchange(held: Span, wants: Sequence[Sequence[Range]]) -> ExchangePlan:
    """Plan the messages with which each rank fetches the ranges of positions that it wants."""
    parts = map(held.part, range(held.num_ranks))
    of_ranks = (tuple(filter(_is_any, ranges)) for ranges in wants)
    return ExchangePlan(tuple(tuple(filter(_is_any, (part,))) for part in parts), tuple(of_ranks))


def _is_any(positions: Range) -> bool:
    return positions.size > 0


@lru_cache(maxsize=4096)
def plan_halos(step: Step) -> ExchangePlan:
    """Plan the messages of a step for ranks that copy only halos: first those before their part, then those after. They
    are the messages of the step.
    """
    return plan_exchange(step.held, [halos_of(step, rank) for rank in range(step.held.num_ranks)])


def halos_of(step: Step, rank: int) -> tuple[Range, Range]:
    """Return the positions of other ranks that a rank reads before its own part, and those after it."""
    held, inside = step.held.part(rank), step.wants[rank].inside
    before, after = min(inside.stop, held.start), max(inside.start, held.stop)
    return Range(inside.start, max(before, inside.start)), Range(min(after, inside.stop), inside.stop)


def plan_move(held: Span, to: Span) -> ExchangePlan:
    """Plan the messages that divide an image anew."""
    return plan_exchange(held, [[to.part(rank)] for rank in range(to.num_ranks)])


def plan_gather(held: Span) -> ExchangePlan:
    """Plan the messages that give every rank all positions."""
    return plan_exchange(held, [[Range(0, held.size)]] * held.num_ranks)


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

    `steps` has one `plan_step` or `plan_linear_step` per direction, `place` the rank's position along each axis, and
    `leading` is the number of images times channels. The directions follow one another, so each one sends the halos of
    those before it: in two messages, corners come from ranks that are neighbours of neighbours. Terms of outputs follow
    after all halos.
    """
    names = DIRECTIONS[-len(steps) :]
    shape = [step.held.part(rank).size for step, rank in zip(steps, place, strict=True)]
    forward: list[Message] = []
    backward: list[Message] = []

    def send(i: int, plan: ExchangePlan, *, is_conjugate: bool) -> None:
        rank, row, ranks = place[i], leading * prod(shape[:i] + shape[i + 1 :]), range(steps[i].held.num_ranks)
        given = [Message(names[i], other, plan.rows(rank, other) * row) for other in ranks if other != rank]
        taken = [Message(names[i], other, plan.rows(other, rank) * row) for other in ranks if other != rank]
        there, back = (taken, given) if is_conjugate else (given, taken)
        forward.extend(message for message in there if message.elements)
        backward[:0] = [message for message in back if message.elements]

    for i, (step, rank) in enumerate(zip(steps, place, strict=True)):
        send(i, step.exchange, is_conjugate=False)
        want = step.wants[rank]
        shape[i] = want.inside.size + want.num_before + want.num_after
    if any(step.sums for step in steps):
        shape = [step.results(rank).size for step, rank in zip(steps, place, strict=True)]
    for i, (step, rank) in enumerate(zip(steps, place, strict=True)):
        if step.sums:
            send(i, step.sums, is_conjugate=True)
            shape[i] = step.outputs.part(rank).size
    return HaloMessages(forward, backward)
