"""Record which part of the model this process is running, so that a report about a hang can name it.

A *place* is a part of the model together with its layer, such as the attention of layer 3. The forward pass records
each place directly. For the backward pass, the output of a part gets a hook: when the output's gradient arrives, the
backward pass of the part begins.
"""

from functools import cache, partial
from typing import TYPE_CHECKING

from crosscut.flight.record import RECORD, ModelPart

if TYPE_CHECKING:
    from torch import Tensor

_LAYER, _ORDINAL = 8, 4
"""First bit of the layer, and first bit of a part's number among the parts of one name, in the integer that stands for
a place. The lowest bits hold the part."""


def place_of(part: int, layer: int = 0) -> int:
    """Return the integer that stands for a part of the model and its layer in the record."""
    return part | layer << _LAYER


def enter(part: int, layer: int = 0) -> None:
    """Record that the forward pass enters a part of the model."""
    if RECORD.is_open:
        RECORD.at(place_of(part, layer))


def leave(x: "Tensor", part: int, layer: int) -> "Tensor":
    """Return `x`, the output of a part of the model, with a hook that records the place when the part's backward pass
    begins.
    """
    if RECORD.is_open and x.requires_grad:
        x.register_hook(partial(RECORD.at, place_of(part, layer)))
    return x


def enter_part(name: str) -> None:
    """Record that the forward pass enters the part `name` of the current layer."""
    if RECORD.is_open:
        enter(_part_number(name), RECORD.place >> _LAYER)


def leave_part(x: "Tensor", name: str) -> "Tensor":
    """Return `x`, the output of the part `name` of the current layer, with a hook that records the place when the
    part's backward pass begins.
    """
    return leave(x, _part_number(name), RECORD.place >> _LAYER) if RECORD.is_open else x


@cache
def _part_number(name: str) -> int:
    """Number of a layer's part, such as `attention` or, for the second part of this name, `attention_2`."""
    kind, _, ordinal = name.partition("_")
    return ModelPart[kind.upper()] | (int(ordinal or 1) - 1) << _ORDINAL


def place_name(place: int) -> str:
    """Name of a place in the model, such as "layer 3, attention". Empty if the place is outside the model."""
    layer = f"layer {place >> _LAYER}"
    ordinal = (place & (1 << _LAYER) - 1) >> _ORDINAL
    again = f" {ordinal + 1}" if ordinal else ""
    names = {
        ModelPart.EMBEDDING: "embedding",
        ModelPart.LAYER: layer,
        ModelPart.ATTENTION: f"{layer}, attention{again}",
        ModelPart.MLP: f"{layer}, MLP{again}",
        ModelPart.HEAD: "output layer and loss",
        ModelPart.ROOT: "embedding and output layer",
    }
    return names.get(ModelPart(place & (1 << _ORDINAL) - 1), "")
