r"""Muon: an optimizer that orthogonalizes the momentum update of each matrix (Jordan et al. 2024,
kellerjordan.github.io/posts/muon).

With gradient G, momentum M, learning rate r and weight decay d, a step changes a weight W [rows, columns] by

    M <- 0.95 M + 0.05 G
    U  = 0.05 G + 0.95 M                                     (Nesterov)
    W <- (1 - r d) W - r sqrt(max(1, rows / columns)) O(U)   (decoupled weight decay)

O(U) approximates the nearest matrix with orthonormal rows or columns: O(U) has the singular vectors of U, and singular
values near 1. Five Newton-Schulz steps compute O(U) with matrix products alone. Moonlight (arXiv 2502.16982) adds the
weight decay; its scale 0.2 sqrt(max(rows, columns)) is not used here.

O(U) depends on the whole matrix. Momentum is stored in shards, like the weight. The ranks that hold parts of equal
parameters (one in each layer) take turns. They exchange their parts of U, each rank computes O(U) of a different whole
parameter, and the ranks exchange the results (`parallel.state.turns`). The update is therefore the same on every
layout. If a parameter stores several matrices of the model (keys and values, or all experts), each matrix is
orthogonalized separately.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from crosscut.architecture.optimizers.muon import NEWTON_SCHULZ_STEPS, without_name
from crosscut.architecture.parameters import Parameter
from crosscut.parallel.state.parameters import local_part
from crosscut.parallel.state.turns import given_back, num_holders, taken

MOMENTUM = 0.95
"""Decay rate of the momentum, and share of the momentum in the Nesterov update (Jordan et al. 2024)."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b and c of one step: X <- a X + b (X X^T) X + c (X X^T)^2 X. With these coefficients, small singular
values grow fastest, and the singular values of the result are between about 0.7 and 1.2 (Jordan et al. 2024).
"""

AMPLIFICATION = COEFFICIENTS[0] ** NEWTON_SCHULZ_STEPS
"""Factor, about 485, by which the iteration enlarges small singular values and small differences."""


class Muon:
    """Muon's update of individual parameters. `matrices` describes the parameters that Muon updates. `dtype` is the
    element type in which matrices are gathered and orthogonalized; None means the parameter's own type.
    """

    def __init__(self, matrices: Mapping[Tensor, Parameter], *, dtype: torch.dtype | None = None) -> None:
        self.matrices, self.dtype = dict(matrices), dtype

    def turns(self, weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Select the parameters in `weights` that Muon updates, and group them into lists, one for each call of
        `update`. Every rank gets the same lists in the same order.
        """
        equal: dict[Parameter, list[Tensor]] = {}
        for weight in weights:
            if weight in self.matrices:
                equal.setdefault(without_name(self.matrices[weight]), []).append(weight)
        for alike in equal.values():
            size = num_holders(alike[0])
            yield from (alike[first : first + size] for first in range(0, len(alike), size))

    def update(
        self,
        weights: Sequence[Tensor],
        momenta: Sequence[Tensor],
        *,
        rate: float,
        decay: float,
        found_inf: Tensor | None,
    ) -> None:
        """Update the parameters of one turn, and their momenta, from the parameters' gradients. `momenta` holds this
        rank's local parts of the momenta, on the device. `rate` is the learning rate and `decay` the coefficient of
        weight decay.

        If the scalar `found_inf` is 1, the parameters and the momenta stay unchanged. The gradients, which may be
        non-finite, are then not used. Every rank that holds parts of the parameters must call this method.

        Communication: two all-to-alls along each axis that shards the parameters.
        """
        first = weights[0]
        dtype = self.dtype or first.dtype
        applies = 1.0 if found_inf is None else (1 - found_inf).to(first.dtype)
        pairs = zip(weights, momenta, strict=True)
        whole = taken((self._direction(*pair, applies, found_inf).to(dtype) for pair in pairs), first)
        whole = None if whole is None else self._orthogonal(whole, first)
        for weight, update in zip(weights, given_back(whole, first, len(weights), dtype), strict=True):
            own = local_part(weight)
            own.mul_(1 - rate * decay * applies).sub_(update.to(own.dtype).mul_(rate * applies))

    def _direction(self, weight: Tensor, momentum: Tensor, applies: float | Tensor, found_inf: Tensor | None) -> Tensor:
        """Update the momentum, and return this rank's part of U."""
        gradient = local_part(gradient_of(weight))
        if found_inf is not None:
            gradient = torch.where(found_inf > 0, torch.zeros_like(found_inf, dtype=gradient.dtype), gradient)
        momentum.lerp_(gradient, (1 - MOMENTUM) * applies)
        return gradient.lerp(momentum, MOMENTUM)

    def _orthogonal(self, whole: Tensor, weight: Tensor) -> Tensor:
        """Orthogonalize each matrix that a parameter stores, and scale the result by a factor that depends on the
        matrix's shape. `whole` is the update of the whole parameter.
        """
        described = self.matrices[weight]
        if described.stacked:
            return torch.stack([scaled(orthogonalized(matrix)) for matrix in whole])
        if described.num_matrices == 1:
            return scaled(orthogonalized(whole))
        blocks = whole.unflatten(0, (described.heads, described.num_matrices, -1))  # [heads, matrices, rows, columns]
        matrices = (scaled(orthogonalized(block.flatten(0, 1))) for block in blocks.unbind(1))
        parts = [matrix.unflatten(0, (described.heads, -1)) for matrix in matrices]
        return torch.stack(parts, 1).flatten(0, 2)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows or columns, by Newton-Schulz steps. A matrix of zeros does
    not change. Shapes: [rows, columns] to [rows, columns].
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def scaled(matrix: Tensor) -> Tensor:
    """Multiply an orthogonalized matrix [rows, columns] by sqrt(max(1, rows / columns)), in place."""
    return matrix.mul_(max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter. The parameter must have a gradient."""
    assert parameter.grad is not None
    return parameter.grad
