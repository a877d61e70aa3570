"""Norm over the last dimension: layer norm or RMS norm, of the residual stream or of each head.

    layer norm   (x - mean) / deviation * weight + bias
    RMS norm     x / root of the mean square * weight

A norm of the residual stream is outside of the parallel regions, and every rank holds all parameters of the norm. A
norm of heads (QK-norm) is inside a region: each rank normalises only its own heads, so each rank computes only a part
of the gradient of the norm's parameters.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.parameters import Parameter, Role
from crosscut.architecture.steps import Passes, Pointwise, Rows, Value
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.model import NormKind


@dataclass(frozen=True)
class Norm:
    """Norm over vectors of `size` elements."""

    size: int
    weight: Parameter
    bias: Parameter | None
    """Shift of a layer norm; None for an RMS norm."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Weight of the norm, and the bias if the norm is a layer norm."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def statistics(self) -> tuple[int, Kind]:
        """Number and data type of the statistics that are saved per vector for the backward pass.

        A layer norm saves mean and deviation, an RMS norm saves the root mean square.
        """
        return (1, Kind.ROOT) if self.bias is None else (2, Kind.DEVIATION)

    def step(self, name: str, x: Value) -> tuple[Value, "Normalise"]:
        """Norm `x`, a value of the residual stream. Returns the normed value and the step that computes this value."""
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
        """Bytes that the norm reads and writes.

        The forward pass reads and writes the residual stream once. The backward pass moves the stream four times if
        compiled and eight times if not, including the sum with the gradient of the residual path.
        """
        stream = self.reads[0].bytes(target)
        return Passes(forward=2 * stream, backward=(4 if target.compiled else 8) * stream)


def stream_norm(model: ModelConfig, name: str) -> Norm:
    """Describe a norm of the residual stream: a layer norm or an RMS norm, as `model.norm` says."""
    return _norm(model.hidden_size, name, has_shift=model.norm == "layer", inside=False)


def head_norm(model: ModelConfig, name: str) -> Norm | None:
    """Describe the norm of each head's queries or keys; None if the model has no QK-norm."""
    has_shift = model.qk_norm_kind is NormKind.LAYER
    return _norm(model.head_size, name, has_shift=has_shift, inside=True) if model.qk_norm else None


def _norm(size: int, name: str, *, has_shift: bool, inside: bool) -> Norm:
    weight = Parameter(f"{name}.weight", (size,), Role.NORM, inside=inside)
    return Norm(size, weight, replace(weight, name=f"{name}.bias") if has_shift else None)
