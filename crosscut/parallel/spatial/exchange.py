"""Exchange of the positions of a divided image: `fetched`, whose backward pass returns gradients to the positions'
ranks, where they are added.

Each rank sends one message to each rank that reads positions of it, and no other: an all-to-all with uneven parts.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.parallel.collectives import start_uneven_all_to_all, wait
from crosscut.parallel.mesh import Axis
from crosscut.parallel.operators import exchanged
from crosscut.parallel.spatial.plan import ExchangePlan

Pieces = list[list[Tensor]]
"""Pieces of a tensor for each rank of an axis, or from each rank."""


def fetched(x: Tensor, axis: Axis, dim: int, plan: ExchangePlan) -> Tensor:
    """Return the positions of dimension `dim` that this rank fetches by `plan`: those in its range `before`, then those
    in `inside`, then those in `after`.

    `x` has the positions that the rank holds. Forward: one message to each rank that fetches positions of this rank.
    Backward: one message to each rank from which this rank has fetched positions. If no rank needs another rank's
    positions, nothing is sent. The other dimensions of `x` must have the same sizes on all ranks of the axis.
    """
    exchange, want, held = _Exchange(axis, dim, plan), plan.wants[axis.rank], plan.held.part(axis.rank)
    if not plan.sends:  # autograd differentiates the copies
        return x if want.inside == held and want.size == held.size else exchange.fetch(x)
    return exchanged(x, axis, forward=lambda x, _: exchange.fetch(x), backward=lambda g, _: exchange.give_back(g))


class _Exchange(NamedTuple):
    """Exchange along one dimension of a tensor."""

    axis: Axis
    dim: int
    plan: ExchangePlan

    def fetch(self, x: Tensor) -> Tensor:
        """Return the positions that this rank fetches."""
        rank, ranks = self.axis.rank, range(self.axis.size)
        outgoing = [self._cut(x, other) for other in ranks]
        rows = [[piece.size for piece in self.plan.pieces(other, rank)] for other in ranks]
        incoming = self._swapped(outgoing, rows)
        return torch.cat([incoming[other][i] for i in range(3) for other in ranks], self.dim)

    def give_back(self, grad: Tensor) -> Tensor:
        """Return the gradient of the positions that this rank holds: the sum over all ranks that have fetched them."""
        rank, ranks, held = self.axis.rank, range(self.axis.size), self.plan.held.part(self.axis.rank)
        sizes = [[piece.size for piece in self.plan.pieces(other, rank)] for other in ranks]
        in_order = grad.split([sizes[other][i] for i in range(3) for other in ranks], self.dim)
        outgoing = [[in_order[i * self.axis.size + other] for i in range(3)] for other in ranks]
        places = [self.plan.pieces(rank, other) for other in ranks]
        incoming = self._swapped(outgoing, [[piece.size for piece in pieces] for pieces in places])
        total = grad.new_zeros(*grad.shape[: self.dim], held.size, *grad.shape[self.dim + 1 :])
        for pieces, arrived in zip(places, incoming, strict=True):
            for piece, part in zip(pieces, arrived, strict=True):
                total.narrow(self.dim, piece.start - held.start, piece.size).add_(part)
        return total

    def _cut(self, x: Tensor, taker: int) -> list[Tensor]:
        start = self.plan.held.part(self.axis.rank).start
        pieces = self.plan.pieces(self.axis.rank, taker)
        return [x.narrow(self.dim, piece.start - start, piece.size) for piece in pieces]

    def _swapped(self, outgoing: Pieces, rows: list[list[int]]) -> Pieces:
        """Send each rank its pieces, and return the pieces from each rank, which have `rows` positions. Pieces for this
        rank itself are returned as they are.
        """
        own, like = self.axis.rank, outgoing[0][0]
        shape = [*like.shape[: self.dim], -1, *like.shape[self.dim + 1 :]]
        row = prod(size for i, size in enumerate(like.shape) if i != self.dim)
        to = [0 if other == own else sum(map(Tensor.numel, pieces)) for other, pieces in enumerate(outgoing)]
        received = [0 if other == own else sum(each) * row for other, each in enumerate(rows)]
        leaving = (piece.reshape(-1) for other, pieces in enumerate(outgoing) if other != own for piece in pieces)
        flat = torch.cat([like.new_empty(0), *leaving])
        if row and self.plan.sends:
            flat = wait(start_uneven_all_to_all(flat, self.axis, to=to, received=received), self.axis)
        arrived = flat.split([n * row for other, each in enumerate(rows) if other != own for n in each])
        parts = iter(arrived)
        return [
            outgoing[own] if other == own else [next(parts).view([n if s < 0 else s for s in shape]) for n in each]
            for other, each in enumerate(rows)
        ]
