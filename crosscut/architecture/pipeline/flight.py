"""Micro-batches whose tensors a rank of a pipeline holds while it runs a backward pass.

A rank holds the activations of a micro-batch from its forward pass to its backward pass. If the schedule separates the
gradients of weights, the rank then holds the inputs and the gradients of the products until the pass for the weights.
"""

from functools import lru_cache
from operator import ge
from typing import NamedTuple

from crosscut.architecture.pipeline.schedules import Action, Pass, Schedule


class Flight(NamedTuple):
    """Work in progress on a rank at the start of a backward pass. Tuples have one number for each stage of the rank."""

    chunk: int
    """Stage of the rank, from 0, whose backward pass starts."""
    held: tuple[int, ...]
    """Number of other micro-batches between their forward pass and their backward pass."""
    deferred: tuple[int, ...]
    """Number of micro-batches between their backward pass and the gradients of the weights."""
    has_gradients: tuple[bool, ...]
    """Whether a micro-batch has already computed gradients of the weights."""
    has_begun: tuple[bool, ...]
    """Whether a micro-batch has already computed the gradients that no schedule defers, such as those of the loss."""
    receives: bool
    """Whether the next action of the rank needs a message, whose buffer is then allocated."""


PERIODS = 4
"""Number of micro-batches per rank of a pipeline from which on more micro-batches bring no other flights: the ranks
repeat the same order of passes."""


@lru_cache(maxsize=1024)
def flights(schedule: Schedule, rank: int) -> tuple[Flight, ...]:
    """Return the flights of a rank at which its memory may peak. A flight of the schedule is left out if another flight
    of the same stage holds at least as much of everything.
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
    """Count the micro-batches in progress after an action other than the start of a backward pass."""
    if action.kind is Pass.FORWARD:
        held[action.chunk] += 1
    elif separates:
        deferred[action.chunk] += 1 if action.kind is Pass.BACKWARD else -1


def _numbers(flight: Flight) -> tuple[int, ...]:
    """All that the rank holds during the flight, as numbers. A flight with larger numbers holds more."""
    return (*flight.held, *flight.deferred, *flight.has_gradients, *flight.has_begun, flight.receives)
