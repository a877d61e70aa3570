"""Attention over one block of keys at a time. The log-sum-exp of the scores is also returned, to merge the results of
several blocks.

    scores = Q K^T / sqrt(D) + mask,   lse_i = log sum_j exp(scores_ij),   result_i = sum_j exp(scores_ij - lse_i) V_j

The results of two blocks can be merged if the log-sum-exps of both blocks are known. If a block hides all keys from a
query, the query has a log-sum-exp of minus infinity and a result of zeros. PyTorch's CPU kernel returns a log-sum-exp
of 0 for such a query, and this module replaces the 0 by minus infinity.

The gradients of a block are computed from the result and the log-sum-exp of attention over *all* blocks (Dao et al.
2022, arXiv 2205.14135, appendix B.2): with P_ij = exp(scores_ij - lse_i) and the gradient dO of the result O,

    dV = P^T dO,   dS_ij = P_ij (dO_i . V_j - dO_i . O_i),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)

Shapes: B batch, A query heads, K heads of keys and values, S queries, L keys, D elements of a head. K must divide A;
adjacent query heads then share a head of keys and values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config.conventions import AMPERE

_aten = torch.ops.aten


class KeyBlock(NamedTuple):
    """Arguments of attention over one block of keys: queries `q` [B, A, S, D], and the block's keys `k` and values `v`
    [B, K, L, D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool = False
    """Whether query i sees only the keys up to key i. If true, L must equal S, and `mask` must be None."""
    mask: Tensor | None = None
    """Mask that is added to the scores, [B or 1, 1, S or 1, L], in the element type of the queries. Each element is 0,
    or minus infinity for a hidden key. None means no mask.
    """


class Attended(NamedTuple):
    """Result of attention over one block or over all blocks of keys."""

    result: Tensor
    """Weighted sums of the values [B, A, S, D], in the element type of the queries."""
    lse: Tensor
    """Log-sum-exp of the scores [B, A, S], in float32 or wider."""


def attend_block(block: KeyBlock) -> Attended:
    """Compute attention over one block of keys. The function saves nothing for autograd."""
    if block.q.device.type == "cpu":
        result, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            block.q, block.k, block.v, is_causal=block.is_causal, attn_mask=block.mask
        )
        return Attended(result, _without_hidden(lse, block.mask))
    if _has_flash(block):
        shared = _shared_heads(block)
        result, lse, *_ = _aten._scaled_dot_product_flash_attention(block.q, *shared, is_causal=block.is_causal)
        return Attended(result, lse)
    return plain_attention(block)


def attend_block_backward(grad: Tensor, block: KeyBlock, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values of one block. `attended` is the result of attention over all
    blocks, and `grad` [B, A, S, D] is the gradient of `attended.result`.
    """
    if block.q.device.type == "cpu":
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, block.q, block.k, block.v, attended.result, attended.lse, 0.0, block.is_causal, attn_mask=block.mask
        )
        return grads
    if _has_flash(block):
        return _flash_backward(grad, block, attended)
    return plain_attention_backward(grad, block, attended)


def plain_attention(block: KeyBlock) -> Attended:
    """Compute the same as `attend_block` with ordinary matrix products, on any device and in any element type. All
    scores are in memory at once.
    """
    weights, v = _scores(block), _repeated(block.v, block.q).to(_wide(block.q))
    largest = weights.amax(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).min)
    weights = (weights - largest).exp()
    total = weights.sum(-1, keepdim=True)
    result = weights @ v / total.clamp(min=torch.finfo(weights.dtype).tiny)
    return Attended(result.to(block.q.dtype), (largest + total.log()).squeeze(-1))


def plain_attention_backward(grad: Tensor, block: KeyBlock, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as `attend_block_backward` with ordinary matrix products, on any device and in any element
    type.
    """
    wide = _wide(block.q)
    q, k, v = (_repeated(x, block.q).to(wide) for x in block[:3])
    grad, result = grad.to(wide), attended.result.to(wide)
    weights = (_scores(block) - attended.lse.unsqueeze(-1)).exp()
    inner = (grad * result).sum(-1, keepdim=True)
    of_scores = weights * (grad @ v.mT - inner) * block.q.shape[-1] ** -0.5
    grads = of_scores @ k, _summed(of_scores.mT @ q, block.k), _summed(weights.mT @ grad, block.v)
    return grads[0].to(block.q.dtype), grads[1].to(block.k.dtype), grads[2].to(block.v.dtype)


def _scores(block: KeyBlock) -> Tensor:
    """Return the scores [B, A, S, L], including the mask, in float32 or wider."""
    wide = _wide(block.q)
    scores: Tensor = block.q.to(wide) @ _repeated(block.k, block.q).to(wide).mT * block.q.shape[-1] ** -0.5
    if block.mask is not None:
        scores = scores + block.mask
    if block.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _without_hidden(lse: Tensor, mask: Tensor | None) -> Tensor:
    """Return `lse`, with minus infinity for each query whose keys are all hidden by `mask`."""
    return lse if mask is None else lse.masked_fill(mask.isneginf().all(-1), float("-inf"))


def _has_flash(block: KeyBlock) -> bool:
    """Whether the GPU's FlashAttention can compute the block: 16-bit elements, no mask, and a head size that is a
    multiple of 8 and at most 256.
    """
    size = block.q.shape[-1]
    if block.mask is not None or block.q.dtype not in (torch.bfloat16, torch.float16) or size % 8 or size > 256:
        return False
    return torch.cuda.get_device_capability(block.q.device) >= AMPERE


def _shared_heads(block: KeyBlock) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of a block, with each head repeated for all query heads that share it."""
    return _repeated(block.k, block.q), _repeated(block.v, block.q)


def _flash_backward(grad: Tensor, block: KeyBlock, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    k, v = _shared_heads(block)
    unused = torch.empty(0, dtype=torch.int64, device=block.q.device)  # lengths of ragged sequences, random state
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        grad,
        block.q,
        k,
        v,
        attended.result,
        attended.lse,
        None,
        None,
        block.q.shape[2],
        k.shape[2],
        0.0,
        block.is_causal,
        unused,
        unused,
    )
    return dq, _summed(dk, block.k), _summed(dv, block.v)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of `x` (keys or values) for all heads of the queries `q` that share it."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """Undo `_repeated` for a gradient: sum `grad` over the query heads that share a head of `x`."""
    return grad if grad.shape[1] == x.shape[1] else grad.unflatten(1, (x.shape[1], -1)).sum(2)
