"""Autograd operators that communicate between context ranks before and after attention.

Each rank has the queries, keys and values of its own part of the sequence (`zigzag`), but a query needs the keys and
values of the whole sequence. Two methods solve this:

| method       | `enter_context` returns               | forward, backward          | `leave_context` returns     |
|--------------|---------------------------------------|----------------------------|-----------------------------|
| `gather`     | own queries, all keys and values      | all-gather, reduce-scatter | its argument                |
| `all_to_all` | all tokens of 1/C of the heads        | all-to-all, all-to-all     | own tokens of all heads     |

Between the two operators, any attention kernel can be used, with any mask. A third method, `ring`, communicates during
attention (`ring.ring_attention`). Sources: gather as in Llama 3 (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2);
all-to-all as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509).

Shapes: B batch, S sequence, C context ranks, A query heads, K heads of keys and values, D elements of a head.
"""

from itertools import chain

import torch
from torch import Tensor

from crosscut.config import LayoutError
from crosscut.config.conventions import repeats_of_heads
from crosscut.config.layout import ContextAttention
from crosscut.parallel.collectives import all_gather, all_to_all, reduce_scatter
from crosscut.parallel.context.zigzag import join_zigzag, split_zigzag
from crosscut.parallel.mesh import Axis
from crosscut.parallel.operators import exchanged

HEADS, TOKENS = 1, 2
"""Dimension of the heads and dimension of the tokens in queries, keys and values."""

Operands = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


def _join_parts(x: Tensor, axis: Axis) -> Tensor:
    return join_zigzag(all_gather(x, axis, 0).chunk(axis.size), TOKENS)


def _sum_parts(grad: Tensor, axis: Axis) -> Tensor:
    return reduce_scatter(torch.cat(split_zigzag(grad, axis.size, TOKENS)), axis, 0)


def _heads_to_tokens(x: Tensor, axis: Axis) -> Tensor:
    return join_zigzag(all_to_all(torch.cat(x.chunk(axis.size, HEADS)), axis).chunk(axis.size), TOKENS)


def _tokens_to_heads(x: Tensor, axis: Axis) -> Tensor:
    return torch.cat(all_to_all(torch.cat(split_zigzag(x, axis.size, TOKENS)), axis).chunk(axis.size), HEADS)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Gather the parts of the sequence from all context ranks and join them in the order of the sequence: [B, K, S/C,
    D] to [B, K, S, D].

    Forward: all-gather. Backward: reduce-scatter.
    """
    return exchanged(x, axis, forward=_join_parts, backward=_sum_parts)


def scatter_sum_of_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the context ranks, and keep the sums of this rank's part of the sequence: [B, K, S, D] to [B, K, S/C,
    D]. This operator is the conjugate of `gather_sequence`.

    Forward: reduce-scatter. Backward: all-gather.
    """
    return exchanged(x, axis, forward=_sum_parts, backward=_join_parts)


def exchange_heads(x: Tensor, axis: Axis) -> Tensor:
    """Exchange heads for tokens: [B, A, S/C, D] to [B, A/C, S, D]. Rank r gets all tokens of the r-th part of the
    heads.

    Forward: all-to-all. Backward: all-to-all.
    """
    return exchanged(x, axis, forward=_heads_to_tokens, backward=_tokens_to_heads)


def exchange_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Exchange tokens for heads: [B, A/C, S, D] to [B, A, S/C, D]. This function undoes `exchange_heads`.

    Forward: all-to-all. Backward: all-to-all.
    """
    return exchanged(x, axis, forward=_tokens_to_heads, backward=_heads_to_tokens)


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Gather a tensor that needs no gradient, such as document numbers, and join the parts in the order of the
    sequence: [B, S/C] to [B, S].

    Forward: all-gather.
    """
    return join_zigzag(all_gather(x, axis, 0).chunk(axis.size), 1)


def enter_context(q: Tensor, k: Tensor, v: Tensor, axis: Axis, way: ContextAttention) -> Operands:
    """Return the queries for which this rank computes attention, and the keys and values that these queries need.

    `q` is [B, A, S/C, D], and `k` and `v` are [B, K, S/C, D]. With `gather`, the results are `q` and all keys and
    values [B, K, S, D]. With `all_to_all`, the results have all S tokens of 1/C of the heads. If C does not divide K,
    the heads of keys and values are repeated first. Both methods send one message in the forward pass and one in the
    backward pass. Raises `LayoutError` for `all_to_all` if C does not divide A.
    """
    if axis.size == 1:
        return q, k, v
    if way is ContextAttention.GATHER:
        k, v = gather_sequence(torch.cat((k, v), HEADS), axis).chunk(2, HEADS)
        return q, k, v
    return _heads_of_rank(q, k, v, axis)


def leave_context(heads: Tensor, axis: Axis, way: ContextAttention) -> Tensor:
    """Return the results [B, A, S/C, D] of attention for this rank's tokens.

    `heads` is the result of attention after `enter_context`. With `all_to_all`, `heads` is [B, A/C, S, D], and one
    message is sent in the forward pass and one in the backward pass. With `gather`, `heads` is returned unchanged.
    """
    return exchange_tokens(heads, axis) if way is ContextAttention.ALL_TO_ALL else heads


def _heads_of_rank(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Operands:
    """Exchange heads for tokens (`all_to_all`), in a single message for queries, keys and values."""
    if q.shape[HEADS] % axis.size:
        raise LayoutError(
            f"The number of query heads of a rank must be a multiple of the number of context ranks ({axis.size}) for "
            f'all-to-all attention, but is {q.shape[HEADS]}. Set layout.context_attention="gather" or "ring".'
        )
    times = repeats_of_heads(q.shape[HEADS], k.shape[HEADS], axis.size)
    if times > 1:
        k, v = k.repeat_interleave(times, HEADS), v.repeat_interleave(times, HEADS)
    by_rank = zip(*(x.chunk(axis.size, HEADS) for x in (q, k, v)), strict=True)
    exchanged = exchange_heads(torch.cat(list(chain.from_iterable(by_rank)), HEADS), axis)
    own = [x.shape[HEADS] // axis.size for x in (q, k, v)]
    q, k, v = exchanged.split(own, HEADS)
    return q, k, v
