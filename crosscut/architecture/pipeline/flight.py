"""Micro-batches whose tensors a rank of a pipeline holds while it runs a backward pass.

A rank holds the activations of a micro-batch from its forward pass to its backward pass. If the schedule computes the
weight gradients in a separate pass, the rank then holds the input of each product and the gradient of its result until
this pass.
"""

from functools import lru_cache
from operator import ge
from typing import NamedTuple

from crosscut.architecture.pipeline.schedules import Action, Pass, Schedule


class Flight(NamedTuple):
    """Work in progress on a rank at the start of a backward pass. Each tuple has one entry per stage of the rank."""

    chunk: int
    """Stage whose backward pass starts, counted from 0 among the stages of the rank."""
    held: tuple[int, ...]
    """Number of micro-batches, besides the running one, that have finished their forward pass but not their backward
    pass."""
    deferred: tuple[int, ...]
    """Number of micro-batches that have finished their backward pass but not their weight gradients."""
    has_gradients: tuple[bool, ...]
    """Whether any micro-batch has already computed weight gradients."""
    has_begun: tuple[bool, ...]
    """Whether any micro-batch has already computed the gradients that no schedule defers, such as those of the loss."""
    receives: bool
    """Whether the rank's next action needs a message. The buffer for this message is then already allocated."""


PERIODS = 4
"""Number of micro-batches per pipeline rank with which all flights of a schedule occur. With more micro-batches, the
ranks only repeat the same order of passes.
"""


@lru_cache(maxsize=1024)
def flights(schedule: Schedule, rank: int) -> tuple[Flight, ...]:
    """Return the states at the start of a backward pass (flights) in which the memory of a rank may peak. A flight is
    left out if another flight of the same stage holds at least as much of everything.
    """
    found = {flight: _numbers(flight) for flight in _walk(schedule, rank)}
    return tuple(
        flight
        for flight, numbers in found.items()
        if not any(
            other.chunk == flight.chunk and other != flight and all(map(ge, more, numbers))
            for other, more in found.items()
        )
    )


def _walk(schedule: Schedule, rank: int) -> list[Flight]:
    actions = schedule.actions[rank]
    last = Pass.WEIGHTS if schedule.separates_weights else Pass.BACKWARD
    held, deferred, gradients, begun = ([0] * schedule.num_chunks for _ in range(4))
    found = []
    for action, following in zip(actions, (*actions[1:], None), strict=True):
        if action.kind is Pass.BACKWARD:
            held[action.chunk] -= 1
            has_gradients, has_begun = (tuple(number > 0 for number in numbers) for numbers in (gradients, begun))
            receives = following is not None and schedule.received(rank, following) is not None
            found.append(Flight(action.chunk, tuple(held), tuple(deferred), has_gradients, has_begun, receives))
            begun[action.chunk] += 1
        _count(action, held, deferred, separates=schedule.separates_weights)
        gradients[action.chunk] += action.kind is last
    return found


def _count(action: Action, held: list[int], deferred: list[int], *, separates: bool) -> None:
    """Update the numbers of micro-batches in progress, `held` and `deferred`, after an action. A micro-batch has
    already been removed from `held` when its backward pass started.
    """
    if action.kind is Pass.FORWARD:
        held[action.chunk] += 1
    elif separates:
        deferred[action.chunk] += 1 if action.kind is Pass.BACKWARD else -1


def _numbers(flight: Flight) -> tuple[int, ...]:
    """Return, as a tuple of numbers, what the rank holds in this flight. Larger numbers stand for more."""
    return (*flight.held, *flight.deferred, *flight.has_gradients, *flight.has_begun, flight.receives)
