"""Attention over a block of keys, and its log-sum-exp, beside attention written out."""

import math

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

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
FIRST = 7
"""Number of keys in the first of two blocks."""
CASES = ["all keys", "causal", "mask", "mask of keys"]


def _block(case: str, num_kv_heads: int, dtype: torch.dtype = torch.float64) -> KeyBlock:
    generator = torch.Generator().manual_seed(3)
    num_keys = 8 if case == "causal" else 12
    q = torch.randn(2, 6, 8, 4, generator=generator, dtype=torch.float64).to(dtype)
    k, v = torch.randn(2, 2, num_kv_heads, num_keys, 4, generator=generator, dtype=torch.float64).to(dtype)
    mask = None
    if case.startswith("mask"):
        hidden = torch.rand(2, 1, 8 if case == "mask" else 1, num_keys, generator=generator) < 0.4
        hidden[1, :, 0] = torch.arange(num_keys) < FIRST  # a query that sees no key of the first block
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf)
    return KeyBlock(q, k, v, case == "causal", mask)


def _scores(block: KeyBlock) -> Tensor:
    k = block.k.repeat_interleave(block.q.shape[1] // block.k.shape[1], 1)
    scores = torch.einsum("bhsd,bhld->bhsl", block.q, k) / math.sqrt(block.q.shape[-1])
    if block.mask is not None:
        scores = scores + block.mask
    if block.is_causal:
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
    return scores


@pytest.mark.parametrize("attend", [attend_block, plain_attention])
@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("case", CASES)
def test_result_and_log_sum_exp_are_those_of_the_formula(case: str, num_kv_heads: int, attend: object) -> None:
    block = _block(case, num_kv_heads)
    result, lse = attend(block)  # type: ignore[operator]
    scores = _scores(block)
    v = block.v.repeat_interleave(6 // num_kv_heads, 1)
    torch.testing.assert_close(result, scores.softmax(-1) @ v, **CLOSE)
    torch.testing.assert_close(lse, scores.logsumexp(-1), **CLOSE)


def test_a_query_without_visible_keys_has_a_log_sum_exp_of_minus_infinity() -> None:
    whole = _block("mask", 3)
    block = KeyBlock(whole.q, whole.k[:, :, :FIRST], whole.v[:, :, :FIRST], False, whole.mask[..., :FIRST])
    for attended in (attend_block(block), plain_attention(block)):
        assert torch.equal(attended.lse[1, :, 0], torch.full((6,), -math.inf, dtype=torch.float64))
        assert not attended.result[1, :, 0].any()


@pytest.mark.parametrize("backward", [attend_block_backward, plain_attention_backward])
@pytest.mark.parametrize("num_kv_heads", [6, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_two_blocks_add_up_to_those_of_all_keys(case: str, num_kv_heads: int, backward: object) -> None:
    whole = _block(case, num_kv_heads)
    grad = torch.randn(whole.q.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    scores = _scores(KeyBlock(*leaves, whole.is_causal, whole.mask)).softmax(-1)
    result = scores @ leaves[2].repeat_interleave(6 // num_kv_heads, 1)
    result.backward(grad)
    attended = Attended(result.detach(), _scores(whole).logsumexp(-1))
    blocks = [whole]
    if not whole.is_causal:
        masks = [None, None] if whole.mask is None else [whole.mask[..., :FIRST], whole.mask[..., FIRST:]]
        halves = [slice(0, FIRST), slice(FIRST, None)]
        blocks = [
            KeyBlock(whole.q, whole.k[:, :, keys], whole.v[:, :, keys], False, mask)
            for keys, mask in zip(halves, masks, strict=True)
        ]
    grads = [backward(grad, block, attended) for block in blocks]  # type: ignore[operator]
    torch.testing.assert_close(sum(each[0] for each in grads), leaves[0].grad, **CLOSE)
    torch.testing.assert_close(torch.cat([each[1] for each in grads], 2), leaves[1].grad, **CLOSE)
    torch.testing.assert_close(torch.cat([each[2] for each in grads], 2), leaves[2].grad, **CLOSE)


def test_sums_of_bfloat16_are_float32() -> None:
    block = _block("all keys", 3, torch.bfloat16)
    for attended in (attend_block(block), plain_attention(block)):
        assert attended.result.dtype == torch.bfloat16
        assert attended.lse.dtype == torch.float32
    torch.testing.assert_close(attend_block(block).lse, plain_attention(block).lse, rtol=1e-2, atol=1e-2)
