"""Exchange of rows between the ranks that share experts, as operators that a compiler can trace.

The host reads the numbers of rows inside the operators. The compiler knows only which tensors have the same unknown
number of rows, so other loads need no other graph. `there` and `back` are each other's backward pass
(`parallel.owners.experts` describes the exchange).

Shapes: N rows of a rank, M rows that a rank receives, E experts, P ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crosscut.parallel.collectives import all_to_all_in_group

SENDING = ("crosscut::send_rows", "crosscut::return_rows")
"""Operators that send their first argument. The last argument is the name of the group."""


class TracedExchange(NamedTuple):
    """Numbers and places of the rows that the ranks of a group exchange."""

    numbers: Tensor
    """Number of rows for each rank, and from each rank [2, P], on the host."""
    order: Tensor
    """Index among the received rows of each row sorted by expert [M]."""
    places: Tensor
    """Place of each received row among the rows sorted by expert [M], the inverse of `order`."""
    ends: Tensor
    """Index after the last row of each of this rank's experts [E / P]."""
    num_rows: int
    """N."""
    group: str
    """Name of the group of the ranks."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the operators after the first one."""
        return self.numbers, self.order, self.places, self.num_rows, self.group


def arrange(of_ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `order` and `places` [M], given the number of rows from each rank for each of this rank's experts [P, E /
    P].
    """
    expert = torch.arange(of_ranks.shape[1], device=of_ranks.device).repeat(len(of_ranks))
    order = expert.repeat_interleave(of_ranks.flatten()).argsort(stable=True)
    return order, torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


def traced_exchange(counts: Tensor, of_ranks: Tensor, num_rows: int, group: str) -> TracedExchange:
    """Plan the exchange of N rows, given this rank's number of rows for each expert [E] and the number of rows from
    each rank for each of this rank's experts [P, E / P].
    """
    numbers, order, places = _planned(counts, of_ranks)
    return TracedExchange(numbers, order, places, of_ranks.sum(0).cumsum(0), num_rows, group)


def send_traced(x: Tensor, exchange: TracedExchange) -> Tensor:
    """Send the rows [N, ...] to the ranks of their experts: [M, ...], sorted by expert."""
    sent: Tensor = _send(x, *exchange.arguments)
    return sent


def return_traced(x: Tensor, exchange: TracedExchange) -> Tensor:
    """Send the rows [M, ...] back: [N, ...], in their first order."""
    returned: Tensor = _return(x, *exchange.arguments)
    return returned


@torch.library.custom_op("crosscut::plan_exchange", mutates_args=())
def _planned(counts: Tensor, of_ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.stack([counts.view(len(of_ranks), -1).sum(1), of_ranks.sum(1)])
    return numbers.cpu(), *arrange(of_ranks)


@_planned.register_fake
def _(counts: Tensor, of_ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = counts.new_empty(torch.library.get_ctx().new_dynamic_size())
    return torch.empty(2, len(of_ranks), dtype=counts.dtype), order, torch.empty_like(order)


@torch.library.custom_op("crosscut::send_rows", mutates_args=())
def _send(x: Tensor, numbers: Tensor, order: Tensor, places: Tensor, num_rows: int, group: str) -> Tensor:
    del places, num_rows
    to, received = numbers.tolist()
    return all_to_all_in_group(x, group, to=to, received=received).index_select(0, order)


@torch.library.custom_op("crosscut::return_rows", mutates_args=())
def _return(x: Tensor, numbers: Tensor, order: Tensor, places: Tensor, num_rows: int, group: str) -> Tensor:
    del order, num_rows
    to, received = numbers.tolist()
    return all_to_all_in_group(x.index_select(0, places), group, to=received, received=to)


@_send.register_fake
def _(x: Tensor, numbers: Tensor, order: Tensor, places: Tensor, num_rows: int, group: str) -> Tensor:
    del numbers, places, num_rows, group
    return x.new_empty(order.shape[0], *x.shape[1:])


@_return.register_fake
def _(x: Tensor, numbers: Tensor, order: Tensor, places: Tensor, num_rows: int, group: str) -> Tensor:
    del numbers, order, places, group
    return x.new_empty(num_rows, *x.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, *places, ctx.num_rows, ctx.group = inputs
    ctx.save_for_backward(*places)


_NONE = (None,) * 5
"""Gradients of the arguments after the first one."""

_send.register_autograd(
    lambda ctx, grad: (_return(grad, *ctx.saved_tensors, ctx.num_rows, ctx.group), *_NONE), setup_context=_keep
)
_return.register_autograd(
    lambda ctx, grad: (_send(grad, *ctx.saved_tensors, ctx.num_rows, ctx.group), *_NONE), setup_context=_keep
)
