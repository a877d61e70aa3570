"""Faults of gradients in low rank. `mutations` says how a fault is planted."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.parallel import GradientReducer
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state import low_rank
from crosscut.parallel.state.low_rank import ROWS, LowRankGradients
from crosscut.training import step as training_step
from tests.verification.mutations import BOTH, DATA, TENSOR, fault, instead_of

LOW_RANK = {"gradient_rank": 1}
MOST = {"gradient_rank": 3}


@fault("data ranks take the columns of their own gradients", "blocks.1.mlp.contract", DATA, optimizer=LOW_RANK)
@instead_of(LowRankGradients, "_summed")
def own_columns(summed: Any, self: LowRankGradients, factors: Sequence[Tensor], *which: Any) -> Sequence[Tensor]:
    return factors if which[-1] == ROWS and self.mesh.data.size > 1 else summed(self, factors, *which)


@fault("tensor ranks orthogonalize their own rows of a factor", "blocks.1.mlp.expand", TENSOR, optimizer=MOST)
@instead_of(LowRankGradients, "_summed")
def own_rows(summed: Any, self: LowRankGradients, factors: Sequence[Tensor], *which: Any) -> Sequence[Tensor]:
    whole = summed(self, factors, *which)
    size = self.mesh.tensor.size
    if which[-1] != ROWS or size == 1:
        return whole
    # A rank's own rows, as if they were those of all.
    pairs = zip(whole, which[0], strict=True)
    return [torch.cat([self._own(p, matrix, ROWS)] * size, -2) if matrix.cut == ROWS else p for p, matrix in pairs]


@fault("every data rank adds the whole error", "blocks.1.mlp.contract", DATA, optimizer=LOW_RANK)
@instead_of(low_rank._Matrix, "moved")
def whole_error(moved: Any, self: Any) -> Tensor:
    own, self.num_terms = self.num_terms, 1
    try:
        return moved(self)
    finally:
        self.num_terms = own


@fault("data ranks begin with factors of their own", "blocks.1.mlp.contract", DATA, optimizer=LOW_RANK)
@instead_of(low_rank, "_made")
def own_factors(made: Any, name: str, parameter: nn.Parameter, mesh: ParallelMesh, **options: Any) -> Any:
    return made(name, parameter, mesh, **{**options, "seed": options["seed"] + mesh.data.rank})


@fault("the error memory is not used", "blocks.1.mlp.contract", BOTH, optimizer=LOW_RANK)
@instead_of(low_rank._Matrix, "moved")
def no_error(moved: Any, self: Any) -> Tensor:
    term = moved(self)
    if self.num_terms == 1 and self.parameter.device_mesh.size() == 1:
        return term
    return term - low_rank.local_part(self.error) / self.num_terms


@fault("gradients are summed whole before their factors are", "blocks.1.mlp.contract", DATA, optimizer=LOW_RANK)
@instead_of(training_step, "make_reducer")
def summed_before(_plain: Any, model: nn.Module, mesh: ParallelMesh, *, apart: Mapping[str, object]) -> Any:
    names = set() if mesh.data.size > 1 else apart
    return GradientReducer((p for name, p in model.named_parameters() if name not in names), mesh)
