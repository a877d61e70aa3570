"""One transformer layer, with layer norms before attention and MLP (paper, section 2.2, Figure 2)."""

import torch
from torch import Tensor, nn

from crosscut.config import ModelConfig
from crosscut.model.attention import SelfAttention
from crosscut.model.mlp import MLP
from crosscut.parallel import Dropout, LayerNorm, ParallelMesh, RandomStreams


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, H] to the same."""

    def __init__(self, config: ModelConfig, *, mesh: ParallelMesh, streams: RandomStreams, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden_size, mesh=mesh, dtype=dtype)
        self.attention = SelfAttention(config, mesh=mesh, streams=streams, dtype=dtype)
        self.mlp_norm = LayerNorm(config.hidden_size, mesh=mesh, dtype=dtype)
        self.mlp = MLP(config, mesh=mesh, dtype=dtype)
        self.dropout = Dropout(config.dropout, streams=streams)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y
