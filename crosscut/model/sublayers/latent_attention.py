"""Latent attention, with its heads split over the tensor ranks (multi-head latent attention; DeepSeek-AI 2024, arXiv
2405.04434, section 2.1).

The down projections and the norms of the latents are outside of the parallel region. The latents and the shared part of
the keys enter the region together, and the up projections inside it are column-parallel, cut between heads. The weight
rows of keys and values are ordered (head, key then value, element). The output product is row-parallel.

If several context ranks share a sequence and gather, they gather the latents, and each rank computes the keys and
values of whole sequences. Otherwise, keys and values of heads are sent as in other attention.

Generation keeps the latent and the rotated shared part of the keys. A single new token attends to the latents of all
tokens as if they were the keys and values of one head: q . (W_k c) = (W_k^T q) . c, and sum_i p_i W_v c_i = W_v sum_i
p_i c_i, with the latents c and the rows W_k and W_v of a head. Several tokens at once attend to keys and values that
are computed from the latents.

Shapes: B batch, S sequence, H hidden, A heads, N elements of a head without positions, R rotated elements, D = N + R,
V elements of a value, L elements of the latent of keys and values, Q of that of the queries, T tensor ranks, C context
ranks.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers import latent_attention as architecture
from crosscut.config.layout import ContextAttention
from crosscut.model.building import Builder
from crosscut.model.cache import PartMemory
from crosscut.model.shared import NOTHING_SHARED, Shared
from crosscut.model.sublayers.attention import AttentionCore
from crosscut.model.sublayers.rotary import Rotation, rotate
from crosscut.parallel import enter_tensor_parallel
from crosscut.parallel.context.operators import gather_sequence


class Down(nn.Module):
    """Down projections: [B, S, H] (or [B, S/T, H]) to the latent of the queries [.., Q] if they have one, the latent of
    keys and values [.., L], and the shared part of the keys [.., R].
    """

    def __init__(self, part: architecture.LatentAttention, build: Builder) -> None:
        super().__init__()
        self.query = None if part.query_down is None else build.whole(part.query_down)
        self.latent, self.key = build.whole(part.latent_down), build.whole(part.key)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the latents, before their norms, and the shared part of the keys, before its rotation."""
        layers = (self.query, self.latent, self.key)
        return tuple(layer(x) for layer in layers if layer is not None)


@final
class LatentAttention(AttentionCore):
    """Latent attention. Maps [B, S, H] to [B, S, H] or, under sequence parallelism, [B, S/T, H] to [B, S/T, H]."""

    def __init__(self, part: architecture.LatentAttention, build: Builder) -> None:
        super().__init__(part.core, build)
        self.mesh, self.sizes = build.mesh, part.sizes
        self.down = Down(part, build)
        norms = build.with_epsilon(part.sizes.norm_epsilon)
        self.query_norm = None if part.query_norm is None else norms.region_norm(part.query_norm)
        self.latent_norm = norms.region_norm(part.latent_norm)
        self.query, self.key_value = build.columns(part.query), build.columns(part.key_value)
        self.key_value.is_read = True  # by `_attend_to_latents`
        self.output = build.rows(part.output)

    def forward(self, x: Tensor, shared: Shared = NOTHING_SHARED, memory: PartMemory | None = None) -> Tensor:
        """Let every position attend to the positions that it may see, as in `SelfAttention`."""
        query = None if self.query_norm is not None else self.query(x)
        *of_query, latent, key = self._latents(x)
        query = self.query.multiply(*of_query) if query is None else query
        q = self._rotated(query.unflatten(-1, (-1, self.head_size)).transpose(1, 2), shared.rotation)  # [B, A/T, S, D]
        key = key.unsqueeze(1) if shared.rotation is None else rotate(key.unsqueeze(1), shared.rotation)
        if memory is not None:
            heads = self._attend_on(q, torch.cat((latent.unsqueeze(1), key), -1), memory)
        else:
            is_shared = shared.mask is not None and shared.mask.is_shared
            latent, key = self._gathered(latent.unsqueeze(1), key, is_shared=is_shared)
            operands = self._padded(q, *self._keys_and_values(latent.squeeze(1), key))
            heads = self.runner.core(self._attend, *operands, shared.mask)
        y: Tensor = self.output(heads.transpose(1, 2).flatten(2))  # from [B, A/T, S, V]
        return y

    def _latents(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the latents and the shared part of the keys, and enter the parallel region."""
        *of_query, latent, key = self.down(x)
        if self.query_norm is not None:
            of_query = [self.query_norm(*of_query)]
        parts = (*of_query, self.latent_norm(latent), key)
        entered = enter_tensor_parallel(torch.cat(parts, -1), self.mesh)
        divided: tuple[Tensor, ...] = entered.split([part.shape[-1] for part in parts], -1)
        return divided

    def _rotated(self, q: Tensor, rotation: Rotation | None) -> Tensor:
        """Rotate the last elements of the queries [B, A/T, S, D]."""
        if rotation is None:
            return q
        plain, rotary = q.split((self.sizes.nope_size, self.sizes.rope_size), -1)
        parts = (plain, rotate(rotary, rotation))
        return torch.cat([part.transpose(1, 2) for part in parts], -1).transpose(1, 2)  # stored as [B, S, A/T, D]

    def _gathered(self, latent: Tensor, key: Tensor, *, is_shared: bool) -> tuple[Tensor, Tensor]:
        """Gather the latents [B, 1, S/C, L] and the shared part of the keys [B, 1, S/C, R] of whole sequences, if
        context ranks gather.

        Forward: an all-gather over the context ranks. Backward: a reduce-scatter.
        """
        if not is_shared or self.way is not ContextAttention.GATHER:
            return latent, key
        whole = gather_sequence(torch.cat((latent, key), -1), self.context)
        latent, key = whole.split((latent.shape[-1], key.shape[-1]), -1)
        return latent, key

    def _keys_and_values(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys [B, A/T, S, D] and the values [B, A/T, S, V] of a rank's heads from the latents [B, S, L]
        and the shared part of the keys [B, 1, S, R].
        """
        own = (
            self.key_value.multiply(latent).unflatten(-1, (-1, self.sizes.nope_size + self.value_size)).transpose(1, 2)
        )
        plain, v = own.split((self.sizes.nope_size, self.value_size), -1)
        return torch.cat((plain, key.expand(-1, plain.shape[1], -1, -1)), -1), v

    def _attend_on(self, q: Tensor, latents: Tensor, memory: PartMemory) -> Tensor:
        """Let new tokens attend to the tokens in `memory` and to themselves, and keep their latents and shared parts of
        the keys: `latents` [B, 1, S, L + R].
        """
        kept, sees = memory.extended("latents", latents), memory.reading.sees
        if q.shape[2] == 1 and self.key_value.adapter is None:
            return self._attend_to_latents(q, kept, sees)
        latent, key = kept.split((self.sizes.key_value_rank, self.sizes.rope_size), -1)
        q, k, v = self._padded(q, *self._keys_and_values(latent.squeeze(1), key))
        is_causal = sees is None and q.shape[2] > 1
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, is_causal=is_causal, scale=self.score_factor)
        return mixed[..., : self.value_size]

    def _attend_to_latents(self, q: Tensor, kept: Tensor, sees: Tensor | None) -> Tensor:
        """Let one token of each row attend to latents: `q` [B, A/T, 1, D] and `kept` [B, 1, tokens, L + R] give
        [B, A/T, 1, V].
        """
        nope, rank = self.sizes.nope_size, self.sizes.key_value_rank
        of_heads = self.key_value.own_weight(q.dtype).unflatten(0, (-1, nope + self.value_size))
        of_keys, of_values = of_heads.split((nope, self.value_size), 1)  # [A/T, N, L] and [A/T, V, L]
        plain, rotary = q.squeeze(2).split((nope, self.sizes.rope_size), -1)
        absorbed = torch.bmm(plain.transpose(0, 1), of_keys).transpose(0, 1)  # [B, A/T, L]
        grouped = torch.cat((absorbed, rotary), -1).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(grouped, kept, kept, attn_mask=sees, scale=self.score_factor)
        values = torch.bmm(mixed.squeeze(1)[..., :rank].transpose(0, 1), of_values.transpose(1, 2))
        return values.transpose(0, 1).unsqueeze(2)
