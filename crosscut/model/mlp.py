"""The MLP: first matrix by columns, second by rows, GeLU between them on each rank alone (paper, Figure 3a)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import ModelConfig
from crosscut.parallel import ColumnParallelLinear, ParallelMesh, RowParallelLinear


class MLP(nn.Module):
    """Y = GeLU(X A) B: [B, S, H] to [B, S, H] through [B, S, 4H/T]. GeLU in GPT-2's tanh form."""

    def __init__(self, config: ModelConfig, *, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.expand = ColumnParallelLinear(config.hidden_size, config.mlp_size, mesh=mesh, dtype=dtype)
        self.contract = RowParallelLinear(config.mlp_size, config.hidden_size, mesh=mesh, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Expand, GeLU, contract."""
        y: Tensor = self.contract(self._activate(self.expand(x)))
        return y

    def _activate(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")
