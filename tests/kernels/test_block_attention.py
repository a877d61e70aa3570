"""Attention with a block mask beside attention with the dense mask, written out token by token."""

import math

import pytest
import torch
from torch import Tensor

from crosscut.architecture.blocks import BlockMask
from crosscut.kernels.block_attention import block_attention

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
MASKS = {
    "window": BlockMask(4, window=2, global_blocks=0, stride=0, is_causal=True),
    "window and first blocks": BlockMask(4, window=1, global_blocks=2, stride=0, is_causal=True),
    "fixed": BlockMask(4, window=2, global_blocks=1, stride=3, is_causal=True),
    "single tokens": BlockMask(1, window=2, global_blocks=1, stride=4, is_causal=True),
    "everything": BlockMask(4, window=9, global_blocks=0, stride=0, is_causal=True),
    "Longformer": BlockMask(4, window=2, global_blocks=0, stride=0, is_causal=False),
    "BigBird": BlockMask(4, window=2, global_blocks=2, stride=0, is_causal=False),
    "strided, bidirectional": BlockMask(4, window=1, global_blocks=1, stride=2, is_causal=False),
}


def shown(mask: BlockMask, length: int) -> Tensor:
    """The dense mask [S, S], from the words of the settings."""
    table = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            query, key = i // mask.block_size, j // mask.block_size
            near, is_global = abs(query - key) < mask.window, key < mask.global_blocks
            strided = mask.stride > 0 and (key + 1) % mask.stride == 0
            all_seen = not mask.is_causal and query < mask.global_blocks
            table[i, j] = (near or is_global or strided or all_seen) and not (mask.is_causal and j > i)
    return table


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, real: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = shown(mask, q.shape[2])[None, None]
    if real is not None:
        seen = seen & real[:, None, None, :]
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return torch.where(seen.any(-1, keepdim=True), scores, 0.0).softmax(-1) @ v


def operands(length: int, num_kv_heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, length, heads, 8) for heads in (4, num_kv_heads, num_kv_heads, 4))
    made = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes)
    return tuple(x.requires_grad_() for x in made)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("length", "num_kv_heads"), [(32, 4), (30, 2), (3, 1)])
@pytest.mark.parametrize("name", MASKS)
def test_result_and_gradients_are_those_of_the_dense_mask(
    name: str, length: int, num_kv_heads: int, padded: bool
) -> None:
    *inputs, grad = operands(length, num_kv_heads)
    real = torch.arange(length) < torch.tensor([[length], [length * 2 // 3]]) if padded else None
    results = [attend(*inputs, MASKS[name], real) for attend in (block_attention, written_out)]
    assert all(result.isfinite().all() for result in results)
    if real is not None:  # results of padding are finite, but not used
        results = [result * real[:, None, :, None] for result in results]
    torch.testing.assert_close(*results, **CLOSE)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, grad) for y in results), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", ["fixed", "BigBird"])
def test_groups_have_every_pair_of_blocks_once_and_nothing_else(name: str) -> None:
    mask = MASKS[name]
    pairs = [
        (query, key)
        for group in mask.groups(98)
        for i, query in enumerate(group.queries)
        for key in group.keys[i * group.num_keys : (i + 1) * group.num_keys]
    ]
    blocks = shown(mask, 100).unflatten(0, (25, 4)).unflatten(2, (25, 4)).any(3).any(1)
    assert sorted(pairs) == [tuple(pair) for pair in blocks.nonzero().tolist()]
    assert mask.num_pairs(98) == len(pairs) < 25 * 25 // 2


def test_a_group_gathers_at_most_twice_the_keys_of_the_sequence() -> None:
    mask = BlockMask(64, window=4, global_blocks=1, stride=0, is_causal=True)
    groups = mask.groups(1 << 17)
    assert mask.num_blocks(1 << 17) < max(len(group.keys) for group in groups) <= 2 * mask.num_blocks(1 << 17)
    assert len(groups) < 10


def test_bfloat16_sums_the_gradients_of_keys_in_float32() -> None:
    *inputs, grad = operands(512, 2, torch.bfloat16)
    mask = BlockMask(16, window=2, global_blocks=1, stride=4, is_causal=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours = torch.autograd.grad(block_attention(*inputs, mask), inputs, grad)
    theirs = torch.autograd.grad(written_out(*exact, mask, None), exact, grad.double())
    for found, wanted in zip(ours, theirs, strict=True):
        assert (found - wanted).norm() / wanted.norm() < 0.01
