"""Norm of the last dimension: layer norm or RMS norm, of the residual stream or of each head.

    layer norm   (x - mean) / deviation * weight + bias
    RMS norm     x / root of the mean square * weight

A norm stands between the parallel regions, where every rank holds its whole parameters. A norm of heads (QK-norm)
stands inside a region: each rank normalises its own heads, so each has a part of the parameters' gradient.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.parameters import Parameter, Role
from crosscut.architecture.steps import Passes, Pointwise, Rows, Value
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.model import NormKind


@dataclass(frozen=True)
class Norm:
    """A norm over vectors of `size` elements."""

    size: int
    weight: Parameter
    bias: Parameter | None
    """Shift of a layer norm; None for an RMS norm."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Scale, and the shift of a layer norm."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def statistics(self) -> tuple[int, Kind]:
        """Numbers that the backward pass keeps of each vector: mean and deviation, or the root mean square."""
        return (1, Kind.ROOT) if self.bias is None else (2, Kind.DEVIATION)

    def step(self, name: str, x: Value) -> tuple[Value, "Normalise"]:
        """Normalise a value of the residual stream."""
        width, kind = self.statistics
        normed = replace(x, name=f"{name} out", is_cheap=True)
        statistics = Value(f"{name} statistics", width, Rows.STREAM, kind=kind)
        return normed, Normalise(
            reads=(x,), gives=(normed, statistics), keeps=(x, statistics), parameters=self.parameters
        )


@dataclass(frozen=True, kw_only=True)
class Normalise(Pointwise):
    """Norm of the residual stream."""

    def passes(self, target: Target) -> Passes:
        """Forward it reads and writes the stream. Backward also adds the gradient that goes around the sublayer."""
        stream = self.reads[0].bytes(target)
        return Passes(forward=2 * stream, backward=(4 if target.compiled else 8) * stream)


def stream_norm(model: ModelConfig, name: str) -> Norm:
    """Norm of the residual stream, of the kind that `model.norm` names."""
    return _norm(model.hidden_size, name, has_shift=model.norm == "layer", inside=False)


def head_norm(model: ModelConfig, name: str) -> Norm | None:
    """Norm of each head's queries or keys, if the model has one."""
    has_shift = model.qk_norm_kind is NormKind.LAYER
    return _norm(model.head_size, name, has_shift=has_shift, inside=True) if model.qk_norm else None


def _norm(size: int, name: str, *, has_shift: bool, inside: bool) -> Norm:
    weight = Parameter(f"{name}.weight", (size,), Role.NORM, inside=inside)
    return Norm(size, weight, replace(weight, name=f"{name}.bias") if has_shift else None)
