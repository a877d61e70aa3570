"""Exchange of rows between the ranks that share the experts of a layer.

Each rank has its own tokens, copied to one row for each of a token's experts and sorted by expert. `send_rows` brings
every row to the rank that holds its expert, and `return_rows` brings the expert's result back. No row is dropped, so
the ranks send and receive different numbers of rows. They first exchange these numbers (`plan_exchange`).

    rank 0: rows of experts 0 1 | 2 3  --send_rows-->  rows of experts 0 1, of rank 0 and then of rank 1
    rank 1: rows of experts 0 1 | 2 3  --send_rows-->  rows of experts 2 3, of rank 0 and then of rank 1

Received rows are sorted by expert again. Rows are only copied, in both directions, so the results do not depend on the
number of threads.

Shapes: N rows of a rank, M rows that a rank receives, E experts, P ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.parallel.collectives import all_to_all, start_uneven_all_to_all, wait
from crosscut.parallel.mesh import Axis
from crosscut.parallel.owners.traced_experts import (
    TracedExchange,
    arrange,
    return_traced,
    send_traced,
    traced_exchange,
)


class RowExchange(NamedTuple):
    """Numbers and places of the rows that the ranks of an axis exchange."""

    axis: Axis
    to: list[int]
    """Number of rows for each rank [P]."""
    received: list[int]
    """Number of rows from each rank [P]."""
    order: Tensor
    """Index among the received rows of each row sorted by expert [M]."""
    places: Tensor
    """Place of each received row among the rows sorted by expert [M], the inverse of `order`."""
    ends: Tensor
    """Index after the last row of each of this rank's experts [E / P]."""


Exchange = RowExchange | TracedExchange | None
"""Plan of an exchange, for uncompiled or for compiled code; None if one rank holds all experts."""


def plan_exchange(counts: Tensor, num_rows: int, axis: Axis, *, is_traced: bool = False) -> Exchange:
    """Exchange the numbers of rows, given this rank's number of rows for each expert [E], as integers, and their sum
    `num_rows`. Returns None if one rank holds all experts. `is_traced` plans for code that a compiler traces. A fake
    tensor has no values: the loads then count as even.

    Communication: an all-to-all of E integers. The host waits for the result.
    """
    if axis.size == 1:
        return None
    counts = counts.detach()
    of_ranks = all_to_all(counts, axis).view(axis.size, -1)  # rows from each rank for each of this rank's experts
    if is_traced:
        return traced_exchange(counts, of_ranks, num_rows, axis.group_name)
    if isinstance(counts, FakeTensor):
        rows, order = [num_rows // axis.size] * axis.size, counts.new_empty(num_rows)
        return RowExchange(axis, rows, rows, order, torch.empty_like(order), of_ranks.sum(0))
    to, received = counts.view(axis.size, -1).sum(1).tolist(), of_ranks.sum(1).tolist()
    return RowExchange(axis, to, received, *arrange(of_ranks), of_ranks.sum(0).cumsum(0))


def send_rows(x: Tensor, exchange: Exchange) -> Tensor:
    """Send the rows [N, ...], sorted by expert, to the ranks that hold their experts. Returns the rows that this rank
    receives, sorted by expert: [M, ...].

    Forward and backward: an all-to-all, with different numbers of rows for each rank.
    """
    if exchange is None:
        return x
    if isinstance(exchange, TracedExchange):
        return send_traced(x, exchange)
    sent: Tensor = _Sent.apply(x, exchange)
    return sent


def return_rows(x: Tensor, exchange: Exchange, *, skips: bool = False) -> Tensor:
    """Send the rows [M, ...] back to the ranks from which `send_rows` brought them: [N, ...], in their first order.

    Forward and backward: an all-to-all, with different numbers of rows for each rank. With `skips`, the forward pass
    sends nothing and the result has no values, for a repetition whose result no code reads; compiled code sends again.
    """
    if exchange is None:
        return x
    if isinstance(exchange, TracedExchange):
        return return_traced(x, exchange)
    returned: Tensor = _Returned.apply(x, exchange, skips)
    return returned


def _there(x: Tensor, exchange: RowExchange) -> Tensor:
    axis = exchange.axis
    received = wait(start_uneven_all_to_all(x, axis, to=exchange.to, received=exchange.received), axis)
    return received.index_select(0, exchange.order)


def _back(x: Tensor, exchange: RowExchange) -> Tensor:
    axis, rows = exchange.axis, x.index_select(0, exchange.places)
    return wait(start_uneven_all_to_all(rows, axis, to=exchange.received, received=exchange.to), axis)


class _Sent(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _there(x, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _back(grad, ctx.exchange), None


class _Returned(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange, skips: bool) -> Tensor:
        ctx.exchange = exchange
        return x.new_empty(sum(exchange.to), *x.shape[1:]) if skips else _back(x, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _there(grad, ctx.exchange), None, None
