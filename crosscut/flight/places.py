"""Places in the model that the record of this process names in a report about a hang (`flight`).

The forward pass records the place itself. For the backward pass, the output of a part gets a hook: when its gradient
arrives, the backward pass of the part begins.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from crosscut.flight.record import RECORD, Part

_LAYER = 8
"""Number of bits of a place that hold the part."""


class _HasGradient(Protocol):
    """Tensor that can have a gradient."""

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor gets a gradient."""

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` when the gradient arrives."""


_T = TypeVar("_T", bound=_HasGradient)


def place_of(part: Part, layer: int = 0) -> int:
    """Place of a part of the model, as the record stores it."""
    return part | layer << _LAYER


def enter(part: Part, layer: int = 0) -> None:
    """Record that the forward pass enters a part of the model."""
    if RECORD.is_open:
        RECORD.at(place_of(part, layer))


def leave(x: _T, part: Part, layer: int) -> _T:
    """Return `x`, the output of a part of the model. The backward pass of this part records the place."""
    if RECORD.is_open and x.requires_grad:
        x.register_hook(partial(RECORD.at, place_of(part, layer)))
    return x


def enter_part(part: Part) -> None:
    """Record that the forward pass enters a part of the current layer."""
    if RECORD.is_open:
        enter(part, RECORD.place >> _LAYER)


def leave_part(x: _T, part: Part) -> _T:
    """Return `x`, the output of a part of the current layer. The backward pass of this part records the place."""
    return leave(x, part, RECORD.place >> _LAYER) if RECORD.is_open else x
