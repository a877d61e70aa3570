"""Operators that exchange positions by a plan: `fetched`, and `summed`, which is its conjugate.

| operator  | forward                                      | backward                                   |
|-----------|----------------------------------------------|--------------------------------------------|
| `fetched` | positions arrive from the ranks that hold them | gradients return to these ranks and are added |
| `summed`  | terms arrive at the ranks that hold the positions, and are added | gradients are fetched |

Each rank sends one message to each rank that fetches positions of it, and no other: an all-to-all with uneven parts.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.parallel.collectives import start_uneven_all_to_all, wait
from crosscut.parallel.exchange.plan import ExchangePlan, Piece
from crosscut.parallel.mesh import Axis
from crosscut.parallel.operators import exchanged

Pieces = list[list[Tensor]]
"""Pieces of a tensor for each rank of an axis, or from each rank."""


def fetched(x: Tensor, axis: Axis, dim: int, plan: ExchangePlan) -> Tensor:
    """Return the positions of dimension `dim` that this rank fetches by `plan`.

    `x` has the positions that the rank holds. Forward: one message to each rank that fetches positions of this rank.
    Backward: one message to each rank from which this rank has fetched positions. If no rank needs another rank's
    positions, nothing is sent. The other dimensions of `x` must have the same sizes on all ranks of the axis.
    """
    exchange = _Exchange(axis, dim, plan)
    if not plan.sent:  # autograd differentiates the copies
        return x if plan.wants[axis.rank] == plan.held[axis.rank] else exchange.fetch(x)
    return exchanged(x, axis, forward=lambda x, _: exchange.fetch(x), backward=lambda g, _: exchange.give_back(g))


def summed(terms: Tensor, axis: Axis, dim: int, plan: ExchangePlan) -> Tensor:
    """Return the sums over all ranks at the positions of dimension `dim` that this rank holds by `plan`.

    `terms` has this rank's terms at the positions that it fetches by `plan`. Forward: one message to each rank that
    holds such positions. Backward: as many messages, in the other direction.
    """
    exchange = _Exchange(axis, dim, plan)
    if not plan.sent and plan.wants[axis.rank] == plan.held[axis.rank]:
        return terms
    return exchanged(terms, axis, forward=lambda x, _: exchange.give_back(x), backward=lambda g, _: exchange.fetch(g))


class _Exchange(NamedTuple):
    """Exchange along one dimension of a tensor."""

    axis: Axis
    dim: int
    plan: ExchangePlan

    def fetch(self, x: Tensor) -> Tensor:
        """Return the positions that this rank fetches."""
        own, pieces = self.axis.rank, self.plan.pieces
        outgoing = [[self._part(x, piece) for piece in of_taker if piece.giver == own] for of_taker in pieces]
        sizes = [[piece.size for piece in pieces[own] if piece.giver == giver] for giver in range(self.axis.size)]
        arrived = [iter(each) for each in self._swapped(outgoing, sizes, x)]
        return torch.cat([x.narrow(self.dim, 0, 0), *(next(arrived[piece.giver]) for piece in pieces[own])], self.dim)

    def give_back(self, grad: Tensor) -> Tensor:
        """Return the gradient of the positions that this rank holds: the sum over all ranks that have fetched them."""
        own, pieces = self.axis.rank, self.plan.pieces
        parts = list(zip(pieces[own], grad.split([piece.size for piece in pieces[own]], self.dim), strict=True))
        outgoing = [[part for piece, part in parts if piece.giver == giver] for giver in range(self.axis.size)]
        places = [[piece for piece in of_taker if piece.giver == own] for of_taker in pieces]
        arrived = self._swapped(outgoing, [[piece.size for piece in each] for each in places], grad)
        held = sum(each.size for each in self.plan.held[own])
        total = grad.new_zeros(*grad.shape[: self.dim], held, *grad.shape[self.dim + 1 :])
        for of_taker, terms in zip(places, arrived, strict=True):
            for piece, term in zip(of_taker, terms, strict=True):
                self._part(total, piece).add_(term)
        return total

    def _part(self, x: Tensor, piece: Piece) -> Tensor:
        return x.narrow(self.dim, piece.first, piece.size)

    def _swapped(self, outgoing: Pieces, sizes: list[list[int]], like: Tensor) -> Pieces:
        """Send each rank its pieces, and return the pieces from each rank, which have `sizes` positions. Pieces for
        this rank itself are returned as they are.
        """
        own = self.axis.rank
        others = [rank for rank in range(self.axis.size) if rank != own]
        shapes = [[self._shape(like, size) for size in each] for each in sizes]
        to = [0 if rank == own else sum(map(Tensor.numel, pieces)) for rank, pieces in enumerate(outgoing)]
        received = [0 if rank == own else sum(map(prod, each)) for rank, each in enumerate(shapes)]
        flat = torch.cat([like.new_empty(0), *(piece.reshape(-1) for rank in others for piece in outgoing[rank])])
        if self.plan.sent and prod(self._shape(like, 1)):
            flat = wait(start_uneven_all_to_all(flat, self.axis, to=to, received=received), self.axis)
        parts = iter(flat.split([prod(shape) for rank in others for shape in shapes[rank]]))
        return [
            outgoing[own] if rank == own else [next(parts).view(shape) for shape in each]
            for rank, each in enumerate(shapes)
        ]

    def _shape(self, like: Tensor, size: int) -> tuple[int, ...]:
        return (*like.shape[: self.dim], size, *like.shape[self.dim + 1 :])
