"""Record which part of the model this process is running, so that a report about a hang can name it.

A *place* is a part of the model together with its layer, such as the attention of layer 3. The forward pass records
each place directly. For the backward pass, the output of a part gets a hook: when the output's gradient arrives, the
backward pass of the part begins.
"""

from functools import partial
from typing import TYPE_CHECKING

from crosscut.flight.record import RECORD, ModelPart

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = 8
"""Number of bits for the part in the integer that stands for a place. The higher bits hold the layer."""


def place_of(part: ModelPart, layer: int = 0) -> int:
    """Return the integer that stands for a part of the model and its layer in the record."""
    return part | layer << _LAYER


def enter(part: ModelPart, layer: int = 0) -> None:
    """Record that the forward pass enters a part of the model."""
    if RECORD.is_open:
        RECORD.at(place_of(part, layer))


def leave(x: "Tensor", part: ModelPart, layer: int) -> "Tensor":
    """Return `x`, the output of a part of the model, with a hook that records the place when the part's backward pass
    begins.
    """
    if RECORD.is_open and x.requires_grad:
        x.register_hook(partial(RECORD.at, place_of(part, layer)))
    return x


def enter_part(part: ModelPart) -> None:
    """Record that the forward pass enters a part of the current layer."""
    if RECORD.is_open:
        enter(part, RECORD.place >> _LAYER)


def leave_part(x: "Tensor", part: ModelPart) -> "Tensor":
    """Return `x`, the output of a part of the current layer, with a hook that records the place when the part's
    backward pass begins.
    """
    return leave(x, part, RECORD.place >> _LAYER) if RECORD.is_open else x
