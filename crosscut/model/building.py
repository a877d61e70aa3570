"""Build a model's modules from its description in `architecture`. The description defines every shape and how every
matrix is split over the ranks.
"""

from dataclasses import dataclass, replace

import torch

from crosscut.architecture import Cut, Matrix
from crosscut.architecture.sublayers.norm import Norm
from crosscut.config.layout import ContextAttention
from crosscut.config.model import NormKind
from crosscut.model.running import PLAIN, Runner
from crosscut.parallel import (
    Blocks,
    ColumnParallelLinear,
    Dropout,
    LayerNorm,
    NormPlace,
    ParallelMesh,
    RandomStreams,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
)
from crosscut.parallel.recurrent import HeadsNorm


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Builder of the modules of one layer on one rank."""

    mesh: ParallelMesh
    streams: RandomStreams
    dtype: torch.dtype
    """Data type of the parameters."""
    epsilon: float
    """Small number that norms add to the variance or to the mean square."""
    runner: Runner = PLAIN
    context_attention: ContextAttention = ContextAttention.GATHER
    """Way in which attention is computed over a sequence that several ranks share."""

    def with_epsilon(self, epsilon: float) -> "Builder":
        """Return a builder whose norms add another small number."""
        return replace(self, epsilon=epsilon)

    def columns(self, matrix: Matrix) -> ColumnParallelLinear:
        """Build a column-parallel layer."""
        weight, heads = matrix.weight, matrix.weight.heads
        layer = ColumnParallelLinear(
            matrix.in_features,
            Blocks(heads, matrix.out_features // heads) if weight.cut is Cut.HEADS else matrix.out_features,
            mesh=self.mesh,
            bias=matrix.bias is not None,
            dtype=self.dtype,
            how=self.runner.linear,
        )
        if (adapter := matrix.adapter) is not None:
            layer.add_adapter(adapter.rank, scale=adapter.scale, num_matrices=weight.num_matrices)
        return layer

    def whole(self, matrix: Matrix) -> ReplicatedLinear:
        """Build a layer outside of the parallel regions, which every rank holds whole."""
        layer = ReplicatedLinear(
            matrix.in_features,
            matrix.out_features,
            mesh=self.mesh,
            bias=matrix.bias is not None,
            dtype=self.dtype,
            how=self.runner.linear,
        ).on_stream()
        if (adapter := matrix.adapter) is not None:
            layer.add_adapter(adapter.rank, scale=adapter.scale)
        return layer

    def rows(self, matrix: Matrix) -> RowParallelLinear:
        """Build the row-parallel layer at the end of a sublayer or a head."""
        layer = RowParallelLinear(
            matrix.in_features,
            matrix.out_features,
            mesh=self.mesh,
            bias=matrix.bias is not None,
            dtype=self.dtype,
            how=self.runner.last_linear,
        )
        if (adapter := matrix.adapter) is not None:
            layer.add_adapter(adapter.rank, scale=adapter.scale)
        return layer

    def stream_norm(self, norm: Norm) -> LayerNorm | RMSNorm:
        """Build a norm of the residual stream. The runner may recompute this norm in the backward pass."""
        return self._norm(norm, NormPlace(call=self.runner.cheap))

    def head_norm(self, norm: Norm | None) -> LayerNorm | RMSNorm | HeadsNorm | None:
        """Build the norm that is applied to each head, or to all heads together. Returns None if `norm` is None."""
        if norm is None or not norm.heads:
            return None if norm is None else self._norm(norm, NormPlace(inside=norm.inside))
        heads, affine = Blocks(norm.heads, norm.size // norm.heads), bool(norm.parameters)
        return HeadsNorm(heads, mesh=self.mesh, epsilon=self.epsilon, affine=affine, dtype=self.dtype)

    def region_norm(self, norm: Norm) -> LayerNorm | RMSNorm:
        """Build a norm that the runner does not recompute, inside or outside of a parallel region."""
        return self._norm(norm, NormPlace(inside=norm.inside))

    def _norm(self, norm: Norm, place: NormPlace) -> LayerNorm | RMSNorm:
        kind = RMSNorm if norm.kind is NormKind.RMS else LayerNorm
        built = kind(
            norm.size,
            mesh=self.mesh,
            epsilon=self.epsilon,
            affine=bool(norm.parameters),
            dtype=self.dtype,
            place=place,
        )
        return built.from_one() if norm.has_offset and isinstance(built, RMSNorm) else built

    def dropout(self, probability: float, *, inside: bool = False) -> Dropout:
        """Build the dropout of the residual stream, or, with `inside`, of a tensor inside a parallel region."""
        return Dropout(probability, streams=self.streams, inside=inside)
