"""Norm over the last dimension: layer norm or RMS norm, of the residual stream or of each head.

    layer norm   (x - mean) / deviation * weight + bias
    RMS norm     x / root of the mean square * weight

A model may leave out the weight and the bias of its norms (`model.norm_affine`). The weight of an RMS norm may be an
offset from 1 (`model.norm_offset`).

A norm of the residual stream is outside of the parallel regions, and every rank holds all parameters of the norm. A
norm of heads (QK-norm) is inside a region: each rank normalises only its own heads, so each rank computes only a part
of the gradient of the norm's parameters. A norm of all heads together, as in OLMo 2, has the parameters of a rank's
heads on each rank, and the ranks sum their squares.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.parameters import ONES, ZEROS, Cut, Parameter, Role
from crosscut.architecture.steps import Passes, Pointwise, Value
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig
from crosscut.config.model import NormKind, NormSpan


@dataclass(frozen=True)
class Norm:
    """Norm over vectors of `size` elements."""

    size: int
    kind: NormKind
    parameters: tuple[Parameter, ...]
    """Weight of the norm, and the bias if the norm is a layer norm. Empty for a norm without learned parameters."""
    inside: bool
    """Whether the norm is inside a parallel region."""
    heads: int = 0
    """Number of heads that the norm treats as one vector. 0 for a norm of each head, or of the residual stream."""
    has_offset: bool = False
    """Whether the norm multiplies by 1 + its weight."""

    @property
    def statistics(self) -> tuple[int, Kind]:
        """Number and data type of the statistics that are saved per vector for the backward pass.

        A layer norm saves mean and deviation, an RMS norm saves the root mean square.
        """
        return (1, Kind.ROOT) if self.kind is NormKind.RMS else (2, Kind.DEVIATION)

    def step(self, name: str, x: Value) -> tuple[Value, "Normalise"]:
        """Describe the norm of `x`, a value that is not divided into heads. Return the norm's result, and the step."""
        width, kind = self.statistics
        normed = replace(x, name=f"{name} out", is_cheap=True)
        statistics = Value(f"{name} statistics", width, x.rows, kind=kind)
        return normed, Normalise(
            reads=(x,), gives=(normed, statistics), keeps=(x, statistics), parameters=self.parameters
        )


@dataclass(frozen=True, kw_only=True)
class Normalise(Pointwise):
    """Norm of the residual stream."""

    def passes(self, target: Target) -> Passes:
        """Bytes that the norm reads and writes.

        The forward pass reads and writes the residual stream once. The backward pass reads or writes the stream four
        times if compiled and eight times if not, including the sum with the gradient of the residual path.
        """
        stream = self.reads[0].bytes(target)
        return Passes(forward=2 * stream, backward=(4 if target.compiled else 8) * stream)


def stream_norm(model: ModelConfig, name: str) -> Norm:
    """Describe a norm of the residual stream: a layer norm or an RMS norm, as `model.norm` says."""
    return _norm(model, name, size=model.hidden_size, kind=model.norm, inside=False)


def region_norm(model: ModelConfig, name: str) -> Norm:
    """Describe a norm of whole hidden states inside a parallel region. Every rank holds all parameters of the norm."""
    return _norm(model, name, size=model.hidden_size, kind=model.norm, inside=True)


def vector_norm(model: ModelConfig, name: str, size: int) -> Norm:
    """Describe an RMS norm of vectors of `size` elements outside of the parallel regions."""
    return _norm(model, name, size=size, kind=NormKind.RMS, inside=False)


def head_norm(model: ModelConfig, name: str, *, heads: int) -> Norm | None:
    """Describe the norm of the queries or keys of `heads` heads: of each head, or of all heads together. None if the
    model has no QK-norm.
    """
    if not model.qk_norm:
        return None
    norm = _norm(model, name, size=model.head_size, kind=model.qk_norm_kind, inside=True)
    if model.qk_norm_over is NormSpan.HEAD:
        return norm
    size = heads * model.head_size
    parameters = (replace(each, shape=(size,), cut=Cut.HEADS, heads=heads) for each in norm.parameters)
    return Norm(size, norm.kind, tuple(parameters), inside=True, heads=heads)


def _norm(model: ModelConfig, name: str, *, size: int, kind: NormKind, inside: bool) -> Norm:
    weight = ZEROS if model.norm_offset else ONES
    starts = {"weight": weight, "bias": ZEROS} if kind is NormKind.LAYER else {"weight": weight}
    parameters = tuple(
        Parameter(name=f"{name}.{each}", shape=(size,), role=Role.NORM, inside=inside, start=start)
        for each, start in starts.items()
    )
    return Norm(size, kind, parameters if model.norm_affine else (), inside, has_offset=model.norm_offset)
