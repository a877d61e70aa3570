"""Operators that exchange positions by a plan: `fetched`, and `summed`, which is its conjugate.

| operator  | forward                                      | backward                                   |
|-----------|----------------------------------------------|--------------------------------------------|
| `fetched` | positions arrive from the ranks that hold them | gradients return to these ranks and are added |
| `summed`  | terms arrive at the ranks that hold the positions, and are added | gradients are fetched |

Each rank sends one message to each rank that fetches positions of it, and no other: an all-to-all with uneven parts.
"""

from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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


class Flight:
    """Positions on their way: the caller computes between `start_fetch` and `finish_fetch`."""

    def __init__(self, axis: Axis, dim: int, plan: ExchangePlan) -> None:
        self.exchange = _Exchange(axis, dim, plan)
        self._outgoing: _Outgoing | None = None

    def depart(self, outgoing: "_Outgoing") -> None:
        """Keep pieces that were started."""
        self._outgoing = outgoing

    def land(self) -> "_Outgoing | None":
        """Return the pieces that were started last, and let go of them."""
        outgoing, self._outgoing = self._outgoing, None
        return outgoing


class _FlightContext(Protocol):
    flight: Flight


class _Start(Function):
    @staticmethod
    def forward(ctx: _FlightContext, x: Tensor, flight: Flight) -> tuple[Tensor, Tensor]:
        ctx.flight = flight
        flight.depart(flight.exchange.start_fetch(x))
        return x.view_as(x), x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: _FlightContext, grad: Tensor, _ticket: Tensor) -> tuple[Tensor, None]:
        exchange, outgoing = ctx.flight.exchange, ctx.flight.land()
        if outgoing is None:  # this rank has used no fetched position, but other ranks have used its own
            outgoing = exchange.start_give(exchange.zeros(grad))
        return exchange.add_given(outgoing, grad), None  # only one operator reads the view of x


class _Finish(Function):
    @staticmethod
    def forward(ctx: _FlightContext, _ticket: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        outgoing = flight.land()
        assert outgoing is not None
        return flight.exchange.finish_fetch(outgoing)

    @staticmethod
    @once_differentiable
    def backward(ctx: _FlightContext, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.depart(ctx.flight.exchange.start_give(grad))
        return grad.new_zeros(()), None


def start_fetch(x: Tensor, flight: Flight) -> tuple[Tensor, Tensor]:
    """Start to fetch positions. Return `x`, which one operator may read in the meantime, and the ticket for
    `finish_fetch`. The backward pass sends the gradients of the positions back while it computes those of `x`.
    """
    x, ticket = _Start.apply(x, flight)
    return x, ticket


def finish_fetch(ticket: Tensor, flight: Flight) -> Tensor:
    """Wait for the positions, and return them in the order of the plan."""
    fetched: Tensor = _Finish.apply(ticket, flight)
    return fetched


class _Outgoing(NamedTuple):
    """Pieces on their way between the ranks."""

    own: list[Tensor]
    """Pieces that stay on this rank."""
    flat: Tensor
    """Pieces from all other ranks, valid after `wait`."""
    shapes: list[list[tuple[int, ...]]]
    """Shapes of the pieces from each rank."""
    is_sent: bool
    empty: Tensor
    """Part of the tensor without positions."""


class _Exchange(NamedTuple):
    """Exchange along one dimension of a tensor."""

    axis: Axis
    dim: int
    plan: ExchangePlan

    def fetch(self, x: Tensor) -> Tensor:
        """Return the positions that this rank fetches."""
        return self.finish_fetch(self.start_fetch(x))

    def give_back(self, grad: Tensor) -> Tensor:
        """Return the gradient of the positions that this rank holds: the sum over all ranks that have fetched them."""
        held = sum(each.size for each in self.plan.held[self.axis.rank])
        return self.add_given(self.start_give(grad), grad.new_zeros(self._shape(grad, held)))

    def start_fetch(self, x: Tensor) -> _Outgoing:
        """Start to send each rank the positions that it fetches."""
        own, pieces = self.axis.rank, self.plan.pieces
        outgoing = [[self._part(x, piece) for piece in of_taker if piece.giver == own] for of_taker in pieces]
        sizes = [[piece.size for piece in pieces[own] if piece.giver == giver] for giver in range(self.axis.size)]
        return self._started(outgoing, sizes, x)

    def finish_fetch(self, outgoing: _Outgoing) -> Tensor:
        """Wait for the positions that this rank fetches, and join them."""
        arrived = [iter(each) for each in self._arrived(outgoing)]
        pieces = [next(arrived[piece.giver]) for piece in self.plan.pieces[self.axis.rank]]
        return torch.cat(pieces, self.dim) if pieces else outgoing.empty

    def zeros(self, like: Tensor) -> Tensor:
        """Return the gradient of fetched positions that no operator has read."""
        return like.new_zeros(self._shape(like, sum(piece.size for piece in self.plan.pieces[self.axis.rank])))

    def start_give(self, grad: Tensor) -> _Outgoing:
        """Start to send the gradients of the fetched positions to the ranks that hold the positions."""
        own, pieces = self.axis.rank, self.plan.pieces
        parts = list(zip(pieces[own], grad.split([piece.size for piece in pieces[own]], self.dim), strict=True))
        outgoing = [[part for piece, part in parts if piece.giver == giver] for giver in range(self.axis.size)]
        return self._started(outgoing, [[piece.size for piece in each] for each in self._places], grad)

    def add_given(self, outgoing: _Outgoing, total: Tensor) -> Tensor:
        """Add what other ranks have sent to `total`, the gradient of the positions that this rank holds."""
        for of_taker, terms in zip(self._places, self._arrived(outgoing), strict=True):
            for piece, term in zip(of_taker, terms, strict=True):
                self._part(total, piece).add_(term)
        return total

    @property
    def _places(self) -> list[list[Piece]]:
        """Pieces of this rank that each rank fetches."""
        return [[piece for piece in of_taker if piece.giver == self.axis.rank] for of_taker in self.plan.pieces]

    def _part(self, x: Tensor, piece: Piece) -> Tensor:
        return x.narrow(self.dim, piece.first, piece.size)

    def _started(self, outgoing: Pieces, sizes: list[list[int]], like: Tensor) -> _Outgoing:
        """Start to send each rank its pieces. The pieces from each rank have `sizes` positions."""
        own = self.axis.rank
        others = [rank for rank in range(self.axis.size) if rank != own]
        shapes = [[self._shape(like, size) for size in each] for each in sizes]
        to = [0 if rank == own else sum(map(Tensor.numel, pieces)) for rank, pieces in enumerate(outgoing)]
        received = [0 if rank == own else sum(map(prod, each)) for rank, each in enumerate(shapes)]
        flat = torch.cat([like.new_empty(0), *(piece.reshape(-1) for rank in others for piece in outgoing[rank])])
        is_sent = self.plan.sent > 0 and prod(self._shape(like, 1)) > 0
        flat = start_uneven_all_to_all(flat, self.axis, to=to, received=received) if is_sent else flat
        return _Outgoing(outgoing[own], flat, shapes, is_sent, like.narrow(self.dim, 0, 0))

    def _arrived(self, outgoing: _Outgoing) -> Pieces:
        """Wait for the pieces from each rank, and return them together with the pieces that stayed on this rank."""
        own, shapes = self.axis.rank, outgoing.shapes
        flat = wait(outgoing.flat, self.axis) if outgoing.is_sent else outgoing.flat
        parts = iter(flat.split([prod(shape) for rank, each in enumerate(shapes) if rank != own for shape in each]))
        return [
            outgoing.own if rank == own else [next(parts).view(shape) for shape in each]
            for rank, each in enumerate(shapes)
        ]

    def _shape(self, like: Tensor, size: int) -> tuple[int, ...]:
        return (*like.shape[: self.dim], size, *like.shape[self.dim + 1 :])
