"""Gated MLP: two column-parallel matrices with the same input, then a row-parallel matrix (paper, Figure 3a, with a
gate).

Shapes: B batch, S sequence, H hidden, F width between the matrices, T tensor ranks.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.architecture.sublayers import gated_mlp as architecture
from crosscut.config.parts.kinds import FeedForward
from crosscut.kernels.experts import weigh
from crosscut.kernels.functions import run
from crosscut.model.building import Builder
from crosscut.parallel import ColumnParallelLinears


class GatedMLP(nn.Module):
    """MLP with a gate: (act(x gate) * (x up)) contract, with the three matrices `gate`, `up` and `contract` (Shazeer
    2020, arXiv 2002.05202). Maps [B, S, H] to [B, S, H] through [B, S, F/T].
    """

    def __init__(self, part: architecture.GatedMLP, build: Builder) -> None:
        super().__init__()
        self.runner = build.runner
        self.expand = ColumnParallelLinears(gate=build.columns(part.gate), up=build.columns(part.up))
        self.contract = build.rows(part.contract)
        self._activate = GATES[part.kind]

    def forward(self, x: Tensor, *_others: object) -> Tensor:
        """Multiply by the two expanding matrices, apply the gate and multiply by the contracting matrix."""
        y: Tensor = self.contract(self.runner.cheap(self._activate, *self.expand(x)))
        return y

    def inside(self, entered: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute the same inside a parallel region: a summand of the result on each rank, without biases. With
        `weights` [B, S], the result of each token is multiplied by its weight.
        """
        inner = self.expand.inside(entered)
        if weights is None:
            activated = self.runner.cheap(self._activate, *inner)
        else:
            activated = self.runner.cheap(partial(weigh, self._activate), weights, *inner)
        return self.contract.inside(activated, skips=self.contract.skips_now)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) * up. Only `gate` and `up` are kept for the backward pass."""
    return run(_SwiGLU, gate, up, twin=_swiglu)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _SwiGLU(Function):
    """Autograd function that computes `_swiglu` and keeps only gate and up for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up, grad_gate = F.silu(gate).mul_(grad), grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad_up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return GeLU(gate) * up, with GeLU's tanh approximation. Only `gate` and `up` are kept for the backward pass."""
    return run(_GeGLU, gate, up, twin=_geglu)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


class _GeGLU(Function):
    """Autograd function that computes `_geglu` and keeps only gate and up for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.gelu(gate, approximate="tanh").mul_(grad)
        return torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"), grad_up


GATES = {FeedForward.SWIGLU: swiglu, FeedForward.GEGLU: geglu}
"""Functions that combine the outputs of the gate matrix and the up matrix, by the kind of MLP."""
