"""Residual sum around a sublayer, and the dropout before it (paper, section 2.2)."""

from dataclasses import dataclass, replace

from crosscut.architecture.steps import Passes, Pointwise, Rows, Step, Value
from crosscut.architecture.target import Kind, Target


def add_residual(name: str, x: Value, *, around: Value, dropout: float) -> tuple[Value, list[Step]]:
    """Dropout of `x`, then the sum with `around`. Drawing a mask reads no value, so it can be repeated alone."""
    out = replace(around, name=f"after {name}", is_cheap=False)
    if not dropout:
        return out, [Add(reads=(x, around), gives=(out,))]
    mask = dropout_mask(f"{name} mask", x.width)
    dropped = replace(x, name=f"{x.name}, dropped")
    return out, [
        Draw(gives=(mask,)),
        Drop(reads=(x, mask), gives=(dropped,), keeps=(mask,)),
        Add(reads=(dropped, around), gives=(out,)),
    ]


def dropout_mask(name: str, width: int) -> Value:
    """Mask of a dropout on the residual stream."""
    return Value(name, width, Rows.STREAM, kind=Kind.MASK)


@dataclass(frozen=True, kw_only=True)
class Draw(Pointwise):
    """Draw the mask of a dropout."""


@dataclass(frozen=True, kw_only=True)
class Drop(Pointwise):
    """Set the masked elements to zero."""

    def passes(self, target: Target) -> Passes:
        """Dropout reads and writes the stream, and a mask of one byte. Compiled, only the mask counts forward."""
        stream, mask = self.gives[0].bytes(target), self.gives[0].elements(target)
        return Passes(forward=mask if target.compiled else 2 * stream + mask, backward=2 * stream + mask)


@dataclass(frozen=True, kw_only=True)
class Add(Pointwise):
    """Sum of a sublayer's result and the residual stream."""

    def passes(self, target: Target) -> Passes:
        """The sum reads two values and writes one. The backward pass passes the gradient on unchanged."""
        return Passes(forward=3 * self.gives[0].bytes(target))
