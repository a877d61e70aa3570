"""Blocks of attention by the FlashAttention of a GPU, merged over two blocks, beside float64 on the same GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from crosscut.kernels.attention import (
    Attended,
    KeyBlock,
    attend_block,
    attend_block_backward,
    plain_attention,
    plain_attention_backward,
)

pytestmark = pytest.mark.gpu

CLOSE = 1e-2
"""Largest difference in bfloat16, relative to the norm of the result in float64."""


def _inputs(num_kv_heads: int, head_size: int, num_keys: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = [(2, 8, 200, head_size), (2, num_kv_heads, num_keys, head_size), (2, num_kv_heads, num_keys, head_size)]
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _merged(attend: Callable[[KeyBlock], Attended], blocks: list[KeyBlock]) -> Attended:
    parts = [attend(block) for block in blocks]
    lse = torch.stack([part.lse for part in parts]).logsumexp(0)
    results = [part.result * (part.lse - lse).exp().unsqueeze(-1) for part in parts]
    return Attended(sum(results[1:], results[0]).to(parts[0].result.dtype), lse)


def _off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_merged_blocks_and_their_gradients_are_those_of_float64(head_size: int, num_kv_heads: int) -> None:
    q, own_k, own_v = _inputs(num_kv_heads, head_size, 200)
    _, k, v = _inputs(num_kv_heads, head_size, 120)
    blocks = [KeyBlock(q, own_k, own_v, is_causal=True), KeyBlock(q, k, v)]
    wide = [KeyBlock(*(x.double() for x in block[:3]), is_causal=block.is_causal) for block in blocks]
    ours, theirs = _merged(attend_block, blocks), _merged(plain_attention, wide)
    assert _off(ours.result, theirs.result) < CLOSE
    assert _off(ours.lse, theirs.lse) < CLOSE
    grad = torch.randn_like(q)
    for block, wide_block in zip(blocks, wide, strict=True):
        found = attend_block_backward(grad, block, ours)
        expected = plain_attention_backward(grad.double(), wide_block, theirs)
        for name, one, other in zip("qkv", found, expected, strict=True):
            assert _off(one, other) < 2 * CLOSE, f"gradient of {name}"


def test_a_block_with_a_mask_on_a_gpu_is_that_of_float64() -> None:
    q, k, v = _inputs(2, 64, 120)
    mask = torch.zeros(1, 1, 200, 120, device="cuda", dtype=torch.bfloat16)
    mask[..., 60:] = float("-inf")
    mask[:, :, 0] = float("-inf")
    block = KeyBlock(q, k, v, mask=mask)
    result, lse = attend_block(block)
    expected = plain_attention(KeyBlock(q.double(), k.double(), v.double(), mask=mask.double()))
    assert _off(result, expected.result) < CLOSE
    assert bool(lse[:, :, 0].isneginf().all())
    assert _off(lse[:, :, 1:], expected.lse[:, :, 1:]) < CLOSE
