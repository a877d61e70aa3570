"""Self-attention, causal or bidirectional, with its heads split over the tensor ranks (paper, section 3, Figure 3b).

The products for queries, keys and values are column-parallel, cut between heads: each rank holds whole, consecutive
heads. The weight rows of keys and values are ordered (head, key or value, element). The output product is row-parallel.

A model may have fewer heads of keys and values (K) than query heads (A). Each key-value head then serves A/K adjacent
query heads. If K is smaller than the number of tensor ranks, several ranks hold the same key-value head. Keys and
values are repeated per query head only if a GPU's fused kernel cannot share them between query heads.

If several context ranks share a sequence, each rank has the queries, keys and values of its own tokens. The ranks
communicate inside `_attend` and nowhere else, in one of three ways (`parallel.context`).

Shapes: B batch, S sequence, H hidden, A query heads, K heads of keys and values, D elements of a head, T tensor ranks.
With context ranks, S is the number of tokens of a rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers import attention as architecture
from crosscut.config.conventions import takes_shared_heads
from crosscut.config.layout import ContextAttention
from crosscut.model.building import Builder
from crosscut.model.cache import PartMemory
from crosscut.model.documents import AttentionMask
from crosscut.model.shared import NOTHING_SHARED, Shared
from crosscut.model.sublayers.rotary import Rotation, rotate
from crosscut.parallel import ColumnParallelLinears
from crosscut.parallel.context import enter_context, leave_context, ring_attention

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


class SelfAttention(nn.Module):
    """Self-attention. Maps [B, S, H] to [B, S, H] or, under sequence parallelism, [B, S/T, H] to [B, S/T, H]."""

    def __init__(self, part: architecture.Attention, build: Builder) -> None:
        super().__init__()
        self.runner, self.streams = build.runner, build.streams
        self.context, self.way = build.mesh.context, build.context_attention
        self.head_size, self.dropout, self.is_causal = part.head_size, part.dropout, part.is_causal
        self._capability = capability_of(build.mesh.device)
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
        q = query.unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, A/T, S, D]
        k, v = key_value.unflatten(-1, (-1, 2, self.head_size)).transpose(1, 2).unbind(-2)  # each [B, K/T, S, D]
        q, k = _placed(q, self.query_norm, shared.rotation), _placed(k, self.key_norm, shared.rotation)
        heads = self.runner.core(self._attend, q, k, v, shared.mask) if memory is None else memory.attend(q, k, v)
        y: Tensor = self.output(heads.transpose(1, 2).flatten(2))  # from [B, A/T, S, D]
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None = None) -> Tensor:
        """Let this rank's tokens attend to their whole sequences, parts of which other ranks may hold."""
        added = None if mask is None else mask.added
        if mask is None or not mask.is_shared:
            return self._attend_here(q, k, v, added)
        if self.way is ContextAttention.RING:
            return ring_attention(q, k, v, self.context, is_causal=self.is_causal, mask=added)
        q, k, v = enter_context(q, k, v, self.context, self.way)
        return leave_context(self._attend_here(q, k, v, added), self.context, self.way)

    def _attend_here(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self._repeats_keys(q, k, dropout, mask):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # each [B, A/T, S, D]
        how: Any = {"is_causal": self.is_causal} if mask is None else {"attn_mask": mask}
        how["enable_gqa"] = q.shape[1] != k.shape[1]
        if dropout == 0.0:
            return F.scaled_dot_product_attention(q, k, v, **how)
        with self.streams.per_rank():  # each rank drops elements of its own heads (paper, section 3.1)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **how)

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


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, or None for other devices. The capability decides which attention kernels
    the GPU has.
    """
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _placed(heads: Tensor, norm: nn.Module | None, rotation: Rotation | None) -> Tensor:
    """Apply the per-head norm and the rotation to queries or keys. A `norm` or `rotation` of None is skipped."""
    if norm is not None:
        heads = norm(heads)
    return heads if rotation is None else rotate(heads, rotation)
