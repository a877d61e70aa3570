"""Residual connection of a sublayer: dropout of the sublayer's output, then the sum of this output and the sublayer's
input (paper, section 2.2).
"""

from dataclasses import dataclass, replace

from crosscut.architecture.steps import Passes, Pointwise, Rows, Step, Value
from crosscut.architecture.target import Kind, Target


def add_residual(name: str, x: Value, *, around: Value, dropout: float) -> tuple[Value, list[Step]]:
    """Apply dropout to `x` and add the result to `around`. Return the sum, and the steps that compute it.

    A separate step draws the dropout mask. This step reads no value, so recomputation can repeat it alone.
    """
    out = replace(around, name=f"after {name}", is_cheap=False)
    if not dropout:
        return out, [Add(reads=(x, around), gives=(out,))]
    mask = dropout_mask(f"{name} dropout mask", x.width)
    dropped = replace(x, name=f"{x.name}, dropped")
    return out, [
        Draw(gives=(mask,)),
        Drop(reads=(x, mask), gives=(dropped,), keeps=(mask,)),
        Add(reads=(dropped, around), gives=(out,)),
    ]


def dropout_mask(name: str, width: int) -> Value:
    """Dropout mask for the residual stream."""
    return Value(name, width, Rows.STREAM, kind=Kind.MASK)


@dataclass(frozen=True, kw_only=True)
class Draw(Pointwise):
    """Draw a dropout mask."""


@dataclass(frozen=True, kw_only=True)
class Drop(Pointwise):
    """Apply dropout: set the masked elements to zero."""

    def passes(self, target: Target) -> Passes:
        """Bytes that dropout reads and writes: the residual stream twice, and a mask of one byte per element.

        In a compiled layer, only the mask is counted for the forward pass.
        """
        stream, mask = self.gives[0].bytes(target), self.gives[0].elements(target)
        return Passes(forward=mask if target.compiled else 2 * stream + mask, backward=2 * stream + mask)


@dataclass(frozen=True, kw_only=True)
class Add(Pointwise):
    """Add a sublayer's result to the residual stream."""

    def passes(self, target: Target) -> Passes:
        """Bytes that the sum reads and writes: two tensors read, one written.

        The backward pass moves no bytes, because it passes the gradient on unchanged.
        """
        return Passes(forward=3 * self.gives[0].bytes(target))
