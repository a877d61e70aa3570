"""The MLP: first matrix by columns, second by rows, what lies between them on each rank alone (paper, Figure 3a).

Shapes: B batch, S sequence, H hidden, F width between the matrices, T tensor ranks.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.architecture import mlp as architecture
from crosscut.config.model import FeedForward
from crosscut.kernels.functions import run
from crosscut.model.building import Builder


class MLP(nn.Module):
    """Y = act(X A) B: [B, S, H] to [B, S, H] through [B, S, F/T]. GeLU is in GPT-2's tanh form."""

    def __init__(self, part: architecture.MLP, build: Builder) -> None:
        super().__init__()
        self.runner = build.runner
        self.expand = build.columns(part.expand)
        self.contract = build.rows(part.contract, is_last=True)
        self._activate = ACTIVATIONS[part.kind]

    def forward(self, x: Tensor) -> Tensor:
        """Expand, activate, contract."""
        y: Tensor = self.contract(self.runner.cheap(self._activate, self.expand(x)))
        return y


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    y: Tensor = run(_SquaredReLU, x, twin=lambda x: F.relu(x).square())
    return y


class _SquaredReLU(Function):
    """max(x, 0)^2, which keeps x alone for the backward pass (So et al. 2021, arXiv 2109.08668, section 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(grad).mul_(2)


ACTIVATIONS = {FeedForward.GELU: _gelu, FeedForward.RELU2: _relu2}
"""Functions between the two matrices."""
