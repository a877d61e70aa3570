"""Ring attention: keys and values travel around the context ranks, and each rank merges the results of all blocks.

    for each of C steps:  attend to the current block of keys and values while the next one arrives

A block is the keys and values of one rank. A rank never holds more than two blocks. The results for all blocks are
merged by means of the log-sum-exps of the scores. All exponentials are relative to the largest log-sum-exp, so no
exponential overflows. In the backward pass, the blocks travel around again, and the accumulated gradients of each block
follow one step later. Source: Liu et al. 2023, arXiv 2310.01889.

Each rank has an early piece and a late piece of the sequence (see `zigzag`). In causal attention, a rank's early piece
sees the early pieces of all lower ranks. Its late piece sees the early pieces of all ranks, and the late pieces of all
higher ranks. On every rank, each step except the first therefore computes exactly half of the (S/C)^2 pairs of a query
and a key.

Shapes: B batch, S sequence, C context ranks, A query heads, K heads of keys and values, D elements of a head.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from crosscut.kernels.attention import Attended, KeyBlock, attend_block, attend_block_backward
from crosscut.kernels.functions import AutogradContext
from crosscut.parallel.collectives import start_shift, wait
from crosscut.parallel.context.zigzag import split_zigzag
from crosscut.parallel.mesh import Axis

_ALL = slice(None)


class _View(NamedTuple):
    """Part of the queries and part of the keys. One step computes attention between these two parts."""

    queries: slice
    keys: slice
    hides_later: bool
    """Whether query i sees only the keys up to key i. True if the queries and the keys belong to the same tokens,
    attention is causal, and there is no mask.
    """
    mask: Tensor | None


class _Ring(NamedTuple):
    """Ranks of the ring, and the kind of attention."""

    axis: Axis
    is_causal: bool


class _RingContext(AutogradContext[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]], Protocol):
    ring: _Ring


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: _RingContext, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        axis = ring.axis
        merged = _Merged(q)
        both = torch.stack((k, v))
        for step, view in enumerate(_views(ring, q.shape[2], mask)):
            arriving = start_shift(both, axis) if step < axis.size - 1 else both
            merged.add(attend_block(_block(q, both[0], both[1], view)), view.queries)
            both = wait(arriving, axis) if step < axis.size - 1 else both
        result, lse = merged.finish(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, mask)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: _RingContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, result, lse, mask = ctx.saved_tensors
        ring, axis = ctx.ring, ctx.ring.axis
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, sums = torch.zeros_like(q, dtype=wide), torch.zeros((2, *k.shape), dtype=wide, device=k.device)
        # Values come before keys here, unlike in the forward pass. Otherwise, a compiler would find the same shifts in
        # both passes, and keep the blocks of the forward pass in memory.
        both, sums_arriving = torch.stack((v, k)), sums
        for step, view in enumerate(_views(ring, q.shape[2], mask)):
            arriving = start_shift(both, axis) if step < axis.size - 1 else both
            rows, keys = view.queries, view.keys
            attended = Attended(result[:, :, rows], lse[:, :, rows])
            block = _block(q, both[1], both[0], view)
            grads = attend_block_backward(grad[:, :, rows], block, attended)
            sums = wait(sums_arriving, axis) if step else sums
            grad_q[:, :, rows] += grads[0]
            sums[0, :, :, keys] += grads[1]
            sums[1, :, :, keys] += grads[2]
            sums_arriving = start_shift(sums, axis)  # after the last step, the sums arrive at the rank of their keys
            both = wait(arriving, axis) if step < axis.size - 1 else both
        grad_k, grad_v = wait(sums_arriving, axis).to(k.dtype).unbind()
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, is_causal: bool, mask: Tensor | None) -> Tensor:
    """Attend from this rank's tokens to the whole sequence, and return the result [B, A, S/C, D]. `q` [B, A, S/C, D],
    `k` and `v` [B, K, S/C, D] belong to this rank's tokens. The axis must have at least two ranks.

    `mask` [B, 1, S/C, S] or [B, 1, 1, S] is added to the scores. Its elements are 0 or minus infinity, with the keys in
    the order of the sequence. In causal attention, `mask` must also hide later keys. Every query must see at least one
    key of the whole sequence.

    Forward: C - 1 shifts of keys and values. Backward: C - 1 shifts of keys and values, and C shifts of the accumulated
    gradients, in float32 or wider. A shift sends 2 B K S/C D elements to the next rank.
    """
    attended: Tensor = _RingAttention.apply(q, k, v, mask, _Ring(axis, is_causal))
    return attended


class _Merged:
    """Merged result of attention over the blocks so far. The sums are relative to the largest log-sum-exp of each
    query.
    """

    def __init__(self, q: Tensor) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self._values = torch.zeros_like(q, dtype=wide)  # sums of exp(lse - largest) x result
        self._total = torch.zeros(q.shape[:3], dtype=wide, device=q.device)  # sums of exp(lse - largest)
        self._largest = torch.full_like(self._total, float("-inf"))

    def add(self, attended: Attended, rows: slice) -> None:
        """Merge the result of a block for the queries `rows`."""
        before = self._largest[:, :, rows]
        largest = torch.maximum(before, attended.lse)
        base = largest.clamp(min=torch.finfo(largest.dtype).min)  # minus infinity if no key was visible so far
        kept, added = (before - base).exp(), (attended.lse - base).exp()
        values = self._values[:, :, rows] * kept.unsqueeze(-1) + attended.result * added.unsqueeze(-1)
        total = self._total[:, :, rows] * kept + added
        self._values[:, :, rows], self._total[:, :, rows], self._largest[:, :, rows] = values, total, largest

    def finish(self, dtype: torch.dtype) -> Attended:
        """Return the result of attention over all blocks."""
        result = (self._values / self._total.unsqueeze(-1)).to(dtype)
        return Attended(result, self._largest + self._total.log())


def _views(ring: _Ring, length: int, mask: Tensor | None) -> Iterator[_View]:
    """For each step, yield the queries and keys for which this rank computes attention. In step i, the keys come
    from the rank that is i places before this rank. `length` is this rank's number of tokens.
    """
    axis = ring.axis
    parts = None if mask is None else split_zigzag(mask, axis.size, 3)
    early, late = slice(0, length // 2), slice(length // 2, None)
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        queries, keys = _ALL, _ALL
        if ring.is_causal and source < axis.rank:
            keys = early
        elif ring.is_causal and source > axis.rank:
            queries = late
        hides_later = ring.is_causal and source == axis.rank and mask is None
        yield _View(queries, keys, hides_later, _part_of(parts, source, queries, keys))


def _part_of(parts: list[Tensor] | None, source: int, queries: slice, keys: slice) -> Tensor | None:
    """Return the part of the mask for the given queries of this rank and the given keys of the rank `source`. None
    without a mask.
    """
    if parts is None:
        return None
    part = parts[source]
    return part[:, :, queries if part.shape[2] > 1 else _ALL, keys]


def _block(q: Tensor, k: Tensor, v: Tensor, view: _View) -> KeyBlock:
    keys = view.keys
    return KeyBlock(q[:, :, view.queries], k[:, :, keys], v[:, :, keys], view.hides_later, view.mask)
