"""Attention with a block mask: each block of queries attends to some blocks of keys only (`architecture.blocks`).

    for each group of blocks:  gather the keys and values that its queries see, and call the dense kernel

The blocks of a group see equally many keys, so they are sequences of one batch for the kernel. Hidden blocks are never
computed. The backward pass gathers the keys and values again, and adds their gradients to those of the whole sequence.
Queries, keys, values, result and log-sum-exps are saved, as by the dense kernel.

Shapes: B batch, A query heads, K heads of keys and values, S tokens, D elements of a head, N blocks of P tokens, R
blocks of queries of a group, L tokens that each of these blocks sees.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.architecture.blocks import BlockGroup, BlockMask
from crosscut.kernels.attention import Attended, KeyBlock, attend_block, attend_block_backward
from crosscut.kernels.functions import AutogradContext, run

_groups_of: Callable[[BlockMask, int], tuple[BlockGroup, ...]] = torch.compiler.assume_constant_result(BlockMask.groups)
"""The groups of a sequence. A compiler takes them as they are, and does not trace the code that makes them."""


class _Context(AutogradContext[tuple[Tensor, ...]], Protocol):
    blocks: BlockMask


class _BlockAttention(Function):
    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, blocks: BlockMask) -> Tensor:
        length, size = q.shape[2], blocks.block_size
        operands = [_in_blocks(x, size) for x in (q, k, v)]
        result, lses = torch.empty_like(operands[0], memory_format=torch.contiguous_format), []
        for group in _groups(blocks, q, real):
            attended = attend_block(group.block(*operands))
            group.put(result, attended.result)
            lses.append(attended.lse)
        joined = _joined(result, length)
        ctx.save_for_backward(q, k, v, joined, real, *lses)
        ctx.blocks = blocks
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, result, real, *lses = ctx.saved_tensors
        blocks, wide = ctx.blocks, torch.promote_types(q.dtype, torch.float32)
        operands = [_in_blocks(x, blocks.block_size) for x in (q, k, v)]
        of_result, result = _in_blocks(grad, blocks.block_size), _in_blocks(result, blocks.block_size)
        grads = [torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in operands]
        for group, lse in zip(_groups(blocks, q, real), lses, strict=True):
            attended = Attended(group.queries_of(result), lse)
            found = attend_block_backward(group.queries_of(of_result), group.block(*operands), attended)
            group.put(grads[0], found[0])
            for total, more in zip(grads[1:], found[1:], strict=True):
                group.add(total, more)
        of_q, of_k, of_v = (_joined(x.to(q.dtype), q.shape[2]) for x in grads)
        return of_q, of_k, of_v, None, None


def block_attention(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, real: Tensor | None = None) -> Tensor:
    """Attend from `q` [B, A, S, D] to the blocks of `k` and `v` [B, K, S, D] that `blocks` shows, and return the result
    [B, A, S, D]. `real` [B, S] is false for padding, which no token sees; None means that all tokens are real. K must
    divide A.
    """
    result: Tensor = run(_BlockAttention, q, k, v, real, blocks)
    return result


class _Group(NamedTuple):
    """A group of blocks, with indexes as tensors."""

    queries: Tensor
    """Indexes of the blocks of queries [R]."""
    keys: Tensor
    """Indexes of the blocks of keys that each block of queries sees, one after the other."""
    mask: Tensor | None
    """Mask that is added to the scores, [B R or 1, 1, P or 1, L]."""

    def block(self, q: Tensor, k: Tensor, v: Tensor) -> KeyBlock:
        """Return the arguments of the kernel, from queries, keys and values in blocks."""
        return KeyBlock(self.queries_of(q), self._taken(k, self.keys), self._taken(v, self.keys), mask=self.mask)

    def queries_of(self, x: Tensor) -> Tensor:
        """Return the rows of the group's queries [B R, A, P, D] of `x` [B, N, P, A, D]."""
        return self._taken(x, self.queries)

    def _taken(self, x: Tensor, indexes: Tensor) -> Tensor:
        rows: Tensor = x.index_select(1, indexes).view(x.shape[0] * len(self.queries), -1, *x.shape[3:])
        return rows.transpose(1, 2)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Store the rows of the group's queries, `part` [B R, A, P, D], in `whole` [B, N, P, A, D]."""
        whole.index_copy_(1, self.queries, self._spread(part, whole).to(whole.dtype))

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add the rows of the group's keys, `part` [B R, K, L, D], to `total` [B, N, P, K, D]."""
        total.index_add_(1, self.keys, self._spread(part, total).to(total.dtype))

    @staticmethod
    def _spread(part: Tensor, whole: Tensor) -> Tensor:
        return part.transpose(1, 2).reshape(whole.shape[0], -1, *whole.shape[2:])


def _groups(blocks: BlockMask, q: Tensor, real: Tensor | None) -> Iterator[_Group]:
    """Yield the groups of a sequence, with their masks."""
    length, size = q.shape[2], blocks.block_size
    if real is None and length % size and not blocks.is_causal:  # hide what fills the last block
        real = torch.ones(q.shape[0], length, dtype=torch.bool, device=q.device)
    in_blocks = None if real is None else F.pad(real, (0, -length % size)).unflatten(1, (-1, size))
    for group in _groups_of(blocks, length):
        queries, keys = (torch.tensor(each, device=q.device) for each in (group.queries, group.keys))
        shown = _earlier(group, size, q.device) if blocks.is_causal else None
        if in_blocks is not None:
            seen = in_blocks.index_select(1, keys).view(q.shape[0] * len(queries), 1, -1)
            shown = seen if shown is None else shown & seen
        yield _Group(queries, keys, None if shown is None else _added(shown, q.dtype))


def _earlier(group: BlockGroup, size: int, device: torch.device) -> Tensor:
    """Return a mask [P, L] of the keys that are not later than a query. The last block of keys is that of the query."""
    return torch.ones(size, group.num_keys * size, dtype=torch.bool, device=device).tril((group.num_keys - 1) * size)


def _added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a term [B R or 1, 1, P or 1, L] that hides keys. A query whose keys are all hidden sees all of them: the
    query is padding, whose result is not used, but must be finite.
    """
    hidden = ~shown & shown.any(-1, keepdim=True)
    added = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(hidden, float("-inf"))
    return added.unsqueeze(-3) if shown.dim() == 3 else added.expand(1, 1, -1, -1)


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """Return `x` [B, heads, S, D] in blocks of `size` tokens, [B, N, P, heads, D]. Zeros fill the last block."""
    filled = -x.shape[2] % size
    tokens = (F.pad(x, (0, 0, 0, filled)) if filled else x).transpose(1, 2)
    in_blocks: Tensor = tokens.unflatten(1, (-1, size))
    return in_blocks


def _joined(x: Tensor, length: int) -> Tensor:
    """Undo `_in_blocks` for sequences of `length` tokens."""
    return x.flatten(1, 2)[:, :length].transpose(1, 2)
