"""The MLP: first matrix by columns, second by rows, what lies between them on each rank alone (paper, Figure 3a).

Shapes: B batch, S sequence, H hidden, F width between the matrices, T tensor ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.config import ModelConfig
from crosscut.kernels.functions import run
from crosscut.model.running import PLAIN, Runner
from crosscut.parallel import ColumnParallelLinear, ColumnParallelLinears, ParallelMesh, RowParallelLinear


class MLP(nn.Module):
    """Y = GeLU(X A) B: [B, S, H] to [B, S, H] through [B, S, F/T]. GeLU in GPT-2's tanh form."""

    def __init__(self, config: ModelConfig, *, mesh: ParallelMesh, dtype: torch.dtype, runner: Runner = PLAIN) -> None:
        super().__init__()
        self.runner = runner
        hidden, wide = config.hidden_size, config.mlp_size
        place: Any = {"mesh": mesh, "dtype": dtype, "bias": config.biases == "all"}
        self.expand = ColumnParallelLinear(hidden, wide, how=runner.linear, **place)
        self.contract = RowParallelLinear(wide, hidden, how=runner.last_linear, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Expand, GeLU, contract."""
        y: Tensor = self.contract(self.runner.cheap(self._activate, self.expand(x)))
        return y

    def _activate(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class GatedMLP(nn.Module):
    """Y = (SiLU(X G) * X U) B: [B, S, H] to [B, S, H] through [B, S, F/T] (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, mesh: ParallelMesh, dtype: torch.dtype, runner: Runner = PLAIN) -> None:
        super().__init__()
        self.runner = runner
        hidden, wide = config.hidden_size, config.mlp_size
        place: Any = {"mesh": mesh, "dtype": dtype, "bias": config.biases == "all"}
        self.expand = ColumnParallelLinears(
            gate=ColumnParallelLinear(hidden, wide, how=runner.linear, **place),
            up=ColumnParallelLinear(hidden, wide, how=runner.linear, **place),
        )
        self.contract = RowParallelLinear(wide, hidden, how=runner.last_linear, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Expand twice, multiply, contract."""
        y: Tensor = self.contract(self.runner.cheap(self._activate, *self.expand(x)))
        return y

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        y: Tensor = run(_SwiGLU, gate, up, twin=_swiglu)
        return y


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _SwiGLU(Function):
    """Same as `_swiglu`; it keeps gate and up alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


def make_mlp(config: ModelConfig, *, mesh: ParallelMesh, dtype: torch.dtype, runner: Runner = PLAIN) -> MLP | GatedMLP:
    """The MLP that `model.mlp` names."""
    kind = GatedMLP if config.mlp == "swiglu" else MLP
    return kind(config, mesh=mesh, dtype=dtype, runner=runner)
