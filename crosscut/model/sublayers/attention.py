"""Self-attention, causal or bidirectional, with its heads split over the tensor ranks (paper, section 3, Figure 3b).

The products for queries, keys and values are column-parallel, cut between heads: each rank holds whole, consecutive
heads. The weight rows of keys and values are ordered (head, key or value, element). The output product is row-parallel.

A model may have fewer heads of keys and values (K) than query heads (A). Each key-value head then serves A/K adjacent
query heads. If K is smaller than the number of tensor ranks, several ranks hold the same key-value head. Keys and
values are repeated per query head only if a GPU's fused kernel cannot share them between query heads.

If several context ranks share a sequence, each rank has the queries, keys and values of its own tokens. The ranks
communicate inside `_attend` and nowhere else, in one of three ways (`parallel.context`).

Shapes: B batch, S sequence, H hidden, A query heads, K heads of keys and values, D elements of a head, V elements of a
value (D, except in latent attention), T tensor ranks. With context ranks, S is the number of tokens of a rank.
"""

from abc import ABC
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.architecture.needs import Share
from crosscut.architecture.sublayers import attention as architecture
from crosscut.config.conventions import takes_shared_heads
from crosscut.config.layout import ContextAttention
from crosscut.kernels.block_attention import block_attention
from crosscut.kernels.functions import AutogradContext, run
from crosscut.model.building import Builder
from crosscut.model.cache import PartMemory
from crosscut.model.documents import AttentionMask, RealTokens
from crosscut.model.shared import NOTHING_SHARED, Shared
from crosscut.model.sublayers.rotary import Rotation, rotate
from crosscut.parallel import ColumnParallelLinears
from crosscut.parallel.context import enter_context, leave_context, ring_attention
from crosscut.parallel.recurrent import HeadsNorm, normalise_heads

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


class AttentionCore(nn.Module, ABC):
    """Core of attention, the base of all kinds: the weighted sum of the values of the tokens that each token may see,
    on one rank's heads.

    Values may be narrower or wider than queries and keys. Where a kernel or a message needs the same width, they are
    padded with zeros, which change no score.
    """

    def __init__(self, core: architecture.Core, build: Builder) -> None:
        super().__init__()
        self.runner, self.streams, self.score_factor = build.runner, build.streams, core.score_factor
        self.context, self.way = build.mesh.context, build.context_attention
        self.head_size, self.value_size, self.padded_size = core.head_size, core.value_size, core.padded_size
        self.dropout, self.is_causal, self.gathers = core.dropout, core.is_causal, core.gathers
        self.blocks = core.blocks
        self._capability = capability_of(build.mesh.device)

    @property
    def _needs_same_width(self) -> bool:
        """Whether the kernel needs values as wide as queries and keys: the CPU's fused kernel does."""
        return self._capability is None and not (self.training and self.dropout)

    def _padded(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pad queries, keys and values of different widths, if the kernel or a message of the core needs the same
        width. Otherwise, return them, with `v` in memory of its own.
        """
        sends = self.context.size > 1 and self.way is not ContextAttention.GATHER
        if self.head_size == self.value_size or not (sends or self._needs_same_width):
            return q, k, v.contiguous()
        pairs = ((x.transpose(1, 2), (0, self.padded_size - x.shape[-1])) for x in (q, k, v))
        q, k, v = (F.pad(x, width).transpose(1, 2) for x, width in pairs)  # stored as [B, S, A/T, V]
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None = None) -> Tensor:
        """Let this rank's tokens attend to their whole sequences, parts of which other ranks may hold. The arguments
        are those that `_padded` returns, and the result is [B, A/T, S, V].
        """
        added = None if mask is None else mask.added
        if mask is None or not mask.is_shared:
            return self._attend_here(q, k, v, added)
        if self.way is ContextAttention.RING:
            if self.score_factor is not None:  # the ring itself divides scores by the root of the width
                q = q * (self.score_factor * q.shape[-1] ** 0.5)
            return _cut(ring_attention(q, k, v, self.context, is_causal=self.is_causal, mask=added), self.value_size)
        if self.gathers or self.way is ContextAttention.ALL_TO_ALL:
            q, k, v = enter_context(q, k, v, self.context, self.way)
        if not self._needs_same_width:
            q, k, v = _cut(q, self.head_size), _cut(k, self.head_size), _cut(v, self.value_size)
        return leave_context(self._attend_here(q, k, v, added), self.context, self.way)

    def _attend_to_blocks(self, q: Tensor, k: Tensor, v: Tensor, real: RealTokens) -> Tensor:
        """Let this rank's tokens attend to blocks of their whole sequences, parts of which other ranks may hold."""
        if self.score_factor is not None:  # the kernel itself divides scores by the root of the width
            q = q * (self.score_factor * q.shape[-1] ** 0.5)
        if real.is_shared:
            q, k, v = enter_context(q, k, v, self.context, self.way)
        assert self.blocks is not None
        heads = block_attention(q, k, v, self.blocks, real.mask)
        return leave_context(heads, self.context, self.way) if real.is_shared else heads

    def _attend_here(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self._repeats_keys(q, k, dropout, mask):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # each [B, A/T, S, D]
        how: Any = {"is_causal": self.is_causal} if mask is None else {"attn_mask": mask}
        how |= {"enable_gqa": q.shape[1] != k.shape[1], "scale": self.score_factor}
        if dropout == 0.0:
            return _cut(F.scaled_dot_product_attention(q, k, v, **how), self.value_size)
        with self.streams.per_rank():  # each rank drops elements of its own heads (paper, section 3.1)
            return _cut(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **how), self.value_size)

    def _repeats_keys(self, q: Tensor, k: Tensor, dropout: float, mask: Tensor | None) -> bool:
        """Whether keys and values must be repeated for each query head. This is the case if no fused kernel of the GPU
        accepts fewer key-value heads than query heads.
        """
        if q.shape[1] == k.shape[1] or self._capability is None:
            return False
        return not takes_shared_heads(
            _NAMES[q.dtype],
            head_size=self.head_size,
            dropout=dropout,
            capability=self._capability,
            masked=mask is not None,
        )


@final
class SelfAttention(AttentionCore):
    """Self-attention. Maps [B, S, H] to [B, S, H] or, under sequence parallelism, [B, S/T, H] to [B, S/T, H]."""

    def __init__(self, part: architecture.Attention, build: Builder) -> None:
        super().__init__(part.core, build)
        self.window, self.rotation, self.has_gate = part.window, part.rotation, part.has_gate
        self.qkv = ColumnParallelLinears(query=build.columns(part.query), key_value=build.columns(part.key_value))
        self.query_norm, self.key_norm = build.head_norm(part.query_norm), build.head_norm(part.key_norm)
        self.output = build.rows(part.output)

    def forward(
        self,
        x: Tensor,
        shared: Shared = NOTHING_SHARED,
        memory: PartMemory | None = None,
    ) -> Tensor:
        """Let every position attend to all positions or, in causal attention, to itself and all earlier positions,
        including the positions in `memory`. If `shared` has a mask, a position attends only to the positions that the
        mask shows. Other ranks that share the sequence may hold some of these positions.
        """
        query, key_value = self.qkv(x)
        q = query.unflatten(-1, (-1, *([2] if self.has_gate else []), self.head_size))  # [B, S, A/T, D]
        q, gate = q.unbind(-2) if self.has_gate else (q, None)
        k, v = key_value.unflatten(-1, (-1, 2, self.head_size)).unbind(-2)  # each [B, S, K/T, D]
        if isinstance(self.query_norm, HeadsNorm) and isinstance(self.key_norm, HeadsNorm):
            q, k = normalise_heads(q, k, self.query_norm, self.key_norm)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, A/T, S, D], and each [B, K/T, S, D]
        rotation = None if self.rotation is None else self._rotation(shared)
        q, k = _placed(q, self.query_norm, rotation), _placed(k, self.key_norm, rotation)
        heads = self._heads(q, k, v, shared, memory).transpose(1, 2)  # [B, S, A/T, D]
        y: Tensor = self.output(self.runner.cheap(gated, heads, gate) if gate is not None else heads.flatten(2))
        return y

    def _rotation(self, shared: Shared) -> Rotation | None:
        return shared.window_rotation if self.rotation is Share.WINDOW_ROTATION else shared.rotation

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared, memory: PartMemory | None) -> Tensor:
        """Attend, and return the result [B, A/T, S, D]."""
        if memory is not None:
            return memory.attend(q, k, v, span=self.blocks or self.window, scale=self.score_factor)
        if self.blocks is not None:
            return self.runner.core(self._attend_to_blocks, q, k, v, shared.real or RealTokens())
        return self.runner.core(self._attend, q, k, v, shared.window_mask if self.window else shared.mask)


def _cut(x: Tensor, size: int) -> Tensor:
    """Remove the padding after the first `size` elements of each head."""
    return x if x.shape[-1] == size else x[..., :size]


def gated(heads: Tensor, gate: Tensor) -> Tensor:
    """Multiply the results of heads by the sigmoid of their gates, both [B, S, A/T, D], and join the heads. Only
    `heads` and `gate` are kept for the backward pass (Qiu et al. 2025, arXiv 2505.06708, G1).
    """
    return run(_Gated, heads, gate, twin=_gated)


def _gated(heads: Tensor, gate: Tensor) -> Tensor:
    return (heads * gate.sigmoid()).flatten(2)


class _Gated(Function):
    """Autograd function that computes `_gated`, and keeps only the heads and the gates for the backward pass."""

    @staticmethod
    def forward(ctx: AutogradContext[tuple[Tensor, Tensor]], heads: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(heads, gate)
        return (gate.sigmoid() * heads).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[tuple[Tensor, Tensor]], grad: Tensor) -> tuple[Tensor, Tensor]:
        heads, gate = ctx.saved_tensors
        grad, opened = grad.view(heads.shape), gate.sigmoid()
        return grad * opened, torch.ops.aten.sigmoid_backward(grad * heads, opened)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, or None for other devices. The capability decides which attention kernels
    the GPU has.
    """
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _placed(heads: Tensor, norm: nn.Module | None, rotation: Rotation | None) -> Tensor:
    """Apply the norm of each head and the rotation to queries or keys. A `norm` or `rotation` of None is skipped."""
    if norm is not None and not isinstance(norm, HeadsNorm):
        heads = norm(heads)
    return heads if rotation is None else rotate(heads, rotation)
