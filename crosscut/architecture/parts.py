"""Parts of a layer. A part is a sublayer, such as attention or an MLP, with a norm and a residual sum around it.

The norm is before the sublayer (`model.norm_place = "before"`), after the residual sum ("after", as in the original
BERT), or on the sublayer's output ("output", as in OLMo 2). Layers may differ in it (`model.norm_places`).

    before    x = x + dropout(sublayer(norm(x)))
    after     x = norm(x + dropout(sublayer(x)))
    output    x = x + dropout(norm(sublayer(x)))

A part's name is the name of its module, the prefix of its parameters, values and messages, and its name in reports of
hangs. Parts that mix tokens are called `attention`, and parts that treat each token alone are called `mlp`, whatever
their kind is. A layer's second part of one name is `attention_2`, and so on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from crosscut.architecture.inputs import LossTerm
from crosscut.architecture.needs import Memory, Share
from crosscut.architecture.parameters import Parameter
from crosscut.architecture.steps import Rows, Step, Value
from crosscut.architecture.sublayers.norm import Norm
from crosscut.architecture.sublayers.residual import add_residual
from crosscut.architecture.target import Target
from crosscut.config.model import NormPosition


class Sublayer(Protocol):
    """Computation of a part between its norm and its residual sum, such as attention or an MLP."""

    @property
    def name(self) -> str:
        """Name of the part, which is the prefix of the names of the sublayer's parameters, values and messages."""

    @property
    def shares(self) -> frozenset[Share]:
        """Shared tensors that the sublayer reads."""

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""

    def memory(self, target: Target) -> tuple[Memory, ...]:
        """Return the tensors that one rank keeps of earlier tokens to continue a text."""


@runtime_checkable
class Summing(Protocol):
    """A sublayer that returns sums beside its result. A step adds them up over its micro-batches."""

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """Terms of the loss, which the step also adds up over the layers."""

    @property
    def figures(self) -> Mapping[str, int]:
        """Number of elements of each vector that has no gradient, by its name. The step keeps it for each layer."""


@dataclass(frozen=True, eq=False)
class Part:
    """A sublayer with its norm and its residual sum."""

    name: str
    norm: Norm
    inner: Sublayer
    norm_place: NormPosition
    dropout: float
    multiplier: float
    """Factor of the sublayer's result in the residual sum."""

    @property
    def summing(self) -> Summing | None:
        """The sublayer, if it returns sums beside its result."""
        return self.inner if isinstance(self.inner, Summing) else None

    def steps(self, x: Value) -> tuple[Value, tuple[Step, ...]]:
        """Return the residual stream after the part, and the steps that compute it from the stream `x` before."""
        y, before = self._normed(x, NormPosition.BEFORE)
        y, inner = self.inner.steps(y)
        y, on_output = self._normed(y, NormPosition.OUTPUT)
        y, adding = add_residual(self.name, y, around=x, dropout=self.dropout)
        y, after = self._normed(y, NormPosition.AFTER)
        return y, (*before, *inner, *on_output, *adding, *after)

    def _normed(self, x: Value, place: NormPosition) -> tuple[Value, list[Step]]:
        """Return the norm of `x`, and its step, if the part's norm is at this place; otherwise `x`."""
        if self.norm_place is not place:
            return x, []
        normed, normalise = self.norm.step(f"{self.name}_norm", x)
        return normed, [normalise]


@dataclass(frozen=True, eq=False)
class Layer:
    """One part or several, one after the other."""

    parts: tuple[Part, ...]
    hidden_size: int

    @cached_property
    def steps(self) -> tuple[tuple[Step, ...], ...]:
        """Steps of each part."""
        x, found = Value("input", self.hidden_size, Rows.STREAM), []
        for part in self.parts:
            x, steps = part.steps(x)
            found.append(steps)
        return tuple(found)

    @cached_property
    def summing(self) -> dict[str, Summing]:
        """Sublayers that return sums beside their results, by the names of their parts."""
        return {part.name: part.summing for part in self.parts if part.summing is not None}

    def parameters(self) -> Iterator[Parameter]:
        """Parameters of the layer in the order of their use. The names leave out the layer's prefix `blocks.i.`."""
        return (parameter for steps in self.steps for step in steps for parameter in step.parameters)
