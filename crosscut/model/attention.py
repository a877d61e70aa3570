"""Self-attention with its heads split over the tensor ranks (paper, section 3, Figure 3b).

The product for queries, keys and values is column-parallel, head by head: the rows of its weight are ordered (head, one
of q k v, element), so that a rank's contiguous part holds whole heads. The output product is row-parallel.

Shapes: B batch, S sequence, H hidden, A heads, D = H / A elements of a head, T tensor ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import ModelConfig
from crosscut.parallel import ColumnParallelLinear, ParallelMesh, RandomStreams, RowParallelLinear


class SelfAttention(nn.Module):
    """Causal multi-head self-attention: [B, S, H] to [B, S, H] (the sequence split where the layout splits it)."""

    def __init__(self, config: ModelConfig, *, mesh: ParallelMesh, streams: RandomStreams, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size, self.dropout, self.streams = config.head_size, config.dropout, streams
        self.qkv = ColumnParallelLinear(config.hidden_size, 3 * config.hidden_size, mesh=mesh, dtype=dtype)
        self.output = RowParallelLinear(config.hidden_size, config.hidden_size, mesh=mesh, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to this and earlier positions."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)  # each [B, S, A/T, D]
        heads = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # [B, A/T, S, D]
        y: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with self.streams.per_rank():  # each rank drops in its own heads (paper, section 3.1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
