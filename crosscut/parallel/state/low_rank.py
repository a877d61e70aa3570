"""Sum of gradients in low rank with error feedback: PowerSGD (Vogels et al. 2019, arXiv 1905.13727, Algorithms 1, 2).

The ranks that see different tokens hold terms G_w of a gradient G [n, m]. They send two factors of r columns instead:

    M_w = G_w + E_w / N        E: error memory, N: number of terms
    Q   = orthonormal(Q)       [m, r], the factor of the step before
    P   = orthonormal(sum of M_w Q)            all-reduce of n r elements
    Q   = sum of M_w^T P                       all-reduce of m r elements
    G'  = P Q^T                what the optimizer gets
    E_w = N M_w - G'           what a later step catches up on

G' is the projection P P^T of the sum of all M_w, so it does not depend on how the ranks divide the batch. One rank
computes the same as many, and the option changes the trained model in the same way on every layout. For this reason,
tensor ranks also put the factors of a whole matrix together, in one all-reduce of each factor: they have rows of one
factor, and terms of the other.

The error memory is in units of the whole gradient. Its mean over the ranks is what the next step adds, so ranks can
share the errors out evenly before a checkpoint (`share_errors`). The checkpoint then suits every layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.mesh import ParallelMesh, PlanAxes
from crosscut.parallel.random import normal_
from crosscut.parallel.state.parameters import cut_dim, local_part, plan_of, with_local_part

_NOISE = 16.0
"""Rounding of a column's dependent part, as a multiple of the type's precision times the root of its rows."""

ROWS, COLUMNS = -2, -1
"""Dimensions of a matrix, also in a stack of matrices."""


@dataclass(eq=False)
class _Matrix:
    """Matrix, or stack of matrices, whose gradient is summed in low rank."""

    parameter: nn.Parameter
    error: nn.Parameter
    """Error memory E, distributed like the parameter."""
    basis: nn.Parameter
    """Factor Q [m, r] of the step before, whole on every tensor rank."""
    cut: int | None
    """`ROWS` or `COLUMNS`, which the tensor ranks divide. None if every tensor rank holds the whole matrix, and a term
    of its gradient."""
    num_terms: int
    """Number of ranks that hold terms of the same part of the gradient."""
    pending: tuple[Tensor, Tensor] | None = None
    """Error memory and factor after the step, until `commit`."""

    def moved(self) -> Tensor:
        """Return this rank's term of the gradient with its error, M_w."""
        error = local_part(self.error) / self.num_terms
        return error if self.parameter.grad is None else error.add_(local_part(self.parameter.grad))


class LowRankGradients:
    """Sum of the gradients of `parameters` in low rank, with the error memories of this rank.

    Call `reduce` after all backward passes of a step, and `commit` once it is known whether the step counts:

        low_rank.reduce()
        ...
        low_rank.commit(held)

    `parameters` maps names to matrices [n, m], or to stacks of matrices [E, n, m]. `rank` is r. `seed` determines the
    first factors Q, which do not depend on the layout. The reducer of the other gradients must leave `parameters` out.
    Communication of `reduce`, for each plan of ranks: two all-reduces over `PlanAxes.tokens`, and two over the tensor
    axis.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: ParallelMesh, *, rank: int, seed: int) -> None:
        self.mesh = mesh
        self._has_shared = False
        """Whether all ranks have shared their errors since the last step."""
        self._matrices = {name: _made(name, p, mesh, rank=rank, seed=seed) for name, p in parameters.items()}

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace the gradients of the parameters by the low-rank sums of all ranks. The error memories keep their
        values until `commit`.
        """
        for plan in self.mesh.plans:
            matrices = [matrix for matrix in self._matrices.values() if plan_of(matrix.parameter, self.mesh) is plan]
            if matrices:
                self._reduce(matrices, plan)

    @torch.no_grad()
    def commit(self, held: Tensor) -> None:
        """Keep the errors and the factors of the last `reduce`. Drop them if `held`, a scalar, is 1: a step that
        changes no weight, for example because its gradients overflowed, changes no memory either.
        """
        for matrix in self._matrices.values():
            assert matrix.pending is not None, "`reduce` comes first"
            for memory, new in zip((matrix.error, matrix.basis), matrix.pending, strict=True):
                torch.where(held.bool(), local_part(memory), new, out=local_part(memory))
            matrix.pending = None
        self._has_shared = False

    @torch.no_grad()
    def share_errors(self) -> None:
        """Give all ranks the mean of their errors, which the next step uses anyway. Every rank must call this method
        before a checkpoint. Communication: an all-reduce of each error memory over the ranks that hold terms.
        """
        if self._has_shared:  # a second mean would only be rounded again
            return
        self._has_shared = True
        for matrix in self._matrices.values():
            error = local_part(matrix.error)
            summed = all_reduce(error, plan_of(matrix.parameter, self.mesh).tokens)
            if matrix.cut is None:
                summed = all_reduce(summed, self.mesh.tensor)
            error.copy_(summed / matrix.num_terms)

    def state(self) -> dict[str, Tensor]:
        """State for a checkpoint, after `share_errors`. The tensors are live, not copied."""
        each = self._matrices.items()
        errors = {f"{name}.error": matrix.error.detach() for name, matrix in each}
        return errors | {f"{name}.basis": matrix.basis.detach() for name, matrix in each}

    @property
    def errors(self) -> dict[str, nn.Parameter]:
        """Error memories by the names of their parameters, distributed like these."""
        return {name: matrix.error for name, matrix in self._matrices.items()}

    def _reduce(self, matrices: Sequence[_Matrix], plan: PlanAxes) -> None:
        moved = [matrix.moved() for matrix in matrices]
        bases = [_orthonormal(local_part(matrix.basis)) for matrix in matrices]
        products = [m @ self._own(q, matrix, COLUMNS) for m, q, matrix in zip(moved, bases, matrices, strict=True)]
        left = [_independent(p) for p in self._summed(products, matrices, plan, ROWS)]
        own = [self._own(p, matrix, ROWS) for p, matrix in zip(left, matrices, strict=True)]
        right = self._summed([m.mT @ p for m, p in zip(moved, own, strict=True)], matrices, plan, COLUMNS)
        for matrix, m, p, q, whole, before in zip(matrices, moved, own, right, left, bases, strict=True):
            gradient = p @ self._own(q, matrix, COLUMNS).mT
            found = whole.any(-2, keepdim=True)  # other columns keep their former directions, which may find one later
            matrix.pending = m.mul_(matrix.num_terms).sub_(gradient), torch.where(found, q, before)
            matrix.parameter.grad = with_local_part(matrix.parameter.detach(), gradient)

    def _own(self, factor: Tensor, matrix: _Matrix, dim: int) -> Tensor:
        """Return this rank's rows of a whole factor, whose rows belong to dimension `dim` of the matrix."""
        return factor.chunk(self.mesh.tensor.size, -2)[self.mesh.tensor.rank] if matrix.cut == dim else factor

    def _summed(
        self, factors: Sequence[Tensor], matrices: Sequence[_Matrix], plan: PlanAxes, dim: int
    ) -> Sequence[Tensor]:
        """Sum the terms of factors over all ranks, and put together the rows that the tensor ranks divide. The rows
        of a factor belong to dimension `dim` of its matrix.
        """
        axis = self.mesh.tensor
        summed = _split(all_reduce(_flat(factors), plan.tokens), factors)
        if axis.size == 1:
            return summed
        placed = []
        for factor, matrix in zip(summed, matrices, strict=True):
            if matrix.cut != dim:
                placed.append(factor)
                continue
            whole = factor.new_zeros(*factor.shape[:-2], axis.size * factor.shape[-2], factor.shape[-1])
            whole.chunk(axis.size, -2)[axis.rank].copy_(factor)
            placed.append(whole)
        return _split(all_reduce(_flat(placed), axis), placed)


def _made(name: str, parameter: nn.Parameter, mesh: ParallelMesh, *, rank: int, seed: int) -> _Matrix:
    """Make the memories of a matrix."""
    assert isinstance(parameter, DTensor)
    dim, plan = cut_dim(parameter), plan_of(parameter, mesh)
    of_stack = len(parameter.placements) - 1  # the expert axis comes before the tensor axis
    placements: list[Placement] = [*(Shard(0) for _ in range(of_stack)), Replicate()]
    own = local_part(parameter.detach())
    factor = own.new_zeros(*own.shape[:-2], parameter.shape[-1], rank)
    basis = nn.Parameter(DTensor.from_local(factor, parameter.device_mesh, placements, run_check=False))
    normal_(basis, std=1.0, seed=seed, name=f"{name} basis")
    is_cut = dim is not None
    return _Matrix(
        parameter=parameter,
        error=nn.Parameter(torch.zeros_like(parameter.detach())),
        basis=basis,
        cut=dim - parameter.dim() if dim is not None else None,
        num_terms=plan.tokens.size * (1 if is_cut else mesh.tensor.size),
    )


def _orthonormal(factor: Tensor) -> Tensor:
    """Return orthonormal columns that span the columns of a factor."""
    columns: Tensor = torch.linalg.qr(factor)[0]
    return columns


def _independent(factor: Tensor) -> Tensor:
    """Return orthonormal columns that span the columns of a factor, with zeros in place of those that depend on the
    columns before them. A gradient of few tokens has fewer directions than the factor has columns; the others would be
    rounding noise, which depends on the layout.
    """
    columns, triangle = torch.linalg.qr(factor)
    sizes = triangle.diagonal(dim1=-2, dim2=-1).abs()
    noise = _NOISE * factor.shape[-2] ** 0.5 * torch.finfo(factor.dtype).eps
    independent: Tensor = columns * (sizes > noise * sizes.amax(-1, keepdim=True)).unsqueeze(-2)
    return independent


def _flat(factors: Sequence[Tensor]) -> Tensor:
    return torch.cat([factor.reshape(-1) for factor in factors])


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([factor.numel() for factor in like])
    return [piece.view(factor.shape) for piece, factor in zip(pieces, like, strict=True)]
