"""Faults of attention with a block mask. `mutations` says how a fault is planted."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from crosscut.architecture.blocks import BlockMask
from crosscut.config import Layout
from crosscut.kernels import block_attention as kernel
from crosscut.model.sublayers import attention
from tests.verification.mutations import FOUR, SPLIT, TENSOR, Patch, fault, instead_of
from tests.verification.runs import BERT, LLAMA, MASKED

NUM_HEADS = 4
_SECTION = {"block_size": 2, "window": 1, "stride": 3}
BLOCKS: dict[str, Any] = {**LLAMA, "layers": ("sparse_attention swiglu",), "sparse_attention": _SECTION}
ENCODER: dict[str, Any] = {**BERT, **MASKED, "layers": ("sparse_attention gelu",), "sparse_attention": _SECTION}
SHARED = Layout(context=2)
OF_SHARED: dict[str, Any] = {**BLOCKS, "dropout": 0.0, "max_sequence_length": 32}


def with_other_blocks(
    attend: Any, q: Tensor, *operands: Tensor, blocks: BlockMask, real: Any, **changed: int
) -> Tensor:
    """Attend with changed settings of the blocks on a rank that has a part of the heads."""
    result: Tensor = attend(q, *operands, replace(blocks, **changed) if q.shape[1] < NUM_HEADS else blocks, real)
    return result


@fault("ranks leave out the first blocks", "blocks.0.attention", TENSOR, **BLOCKS)
@instead_of(attention, "block_attention")
def without_first_blocks(attend: Any, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, real: Any) -> Tensor:
    return with_other_blocks(attend, q, k, v, blocks=blocks, real=real, global_blocks=0)


@fault("a window of blocks is too long", "blocks.0.attention", FOUR, **BLOCKS)
@instead_of(attention, "block_attention")
def longer_window(attend: Any, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, real: Any) -> Tensor:
    return with_other_blocks(attend, q, k, v, blocks=blocks, real=real, window=blocks.window + 1)


@fault("every n-th block is counted from the wrong one", "blocks.0.attention", SPLIT, **BLOCKS)
@instead_of(attention, "block_attention")
def another_nth_block(attend: Any, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, real: Any) -> Tensor:
    return with_other_blocks(attend, q, k, v, blocks=blocks, real=real, stride=blocks.stride + 1)


@fault("tokens see later tokens of their block", "blocks.0.attention", TENSOR, **BLOCKS)
@instead_of(attention, "block_attention")
def later_tokens_seen(attend: Any, q: Tensor, *operands: Any) -> Tensor:
    with Patch.context() as inside:
        if q.shape[1] < NUM_HEADS:
            inside.setattr(kernel, "_earlier", lambda group, size, _: q.new_ones(size, group.num_keys * size).bool())
        result: Tensor = attend(q, *operands)
        return result


@fault("gradients of keys that several blocks see are not summed", "blocks.1.attention", TENSOR, **BLOCKS)
@instead_of(kernel._Group, "add")
def gradients_of_last_block_alone(add: Any, self: Any, total: Tensor, part: Tensor) -> None:
    if part.shape[1] == NUM_HEADS:
        add(self, total, part)
    else:
        total.index_copy_(1, self.keys, self._spread(part, total).to(total.dtype))


@fault("results of a block at the place of another one", "blocks.0.attention", SPLIT, **BLOCKS)
@instead_of(kernel._Group, "put")
def results_of_another_block(put: Any, self: Any, whole: Tensor, part: Tensor) -> None:
    put(self if part.shape[1] == NUM_HEADS else self._replace(queries=self.queries.flip(0)), whole, part)


@fault("padding is seen by all blocks", "blocks.0.attention", TENSOR, **ENCODER)
@instead_of(attention, "block_attention")
def padding_seen(attend: Any, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, real: Any) -> Tensor:
    return with_other_blocks(attend, q, k, v, blocks=blocks, real=real if q.shape[1] == NUM_HEADS else None)


@fault("context ranks count blocks from their own tokens", "blocks.0.attention", SHARED, **OF_SHARED)
def blocks_of_own_tokens(patch: Patch) -> None:
    patch.setattr(attention, "enter_context", lambda q, k, v, _axis, _way: (q, k, v))
    patch.setattr(attention, "leave_context", lambda heads, _axis, _way: heads)
