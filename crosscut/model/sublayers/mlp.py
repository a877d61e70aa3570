"""MLP: the first matrix is column-parallel and the second is row-parallel, so the activation between the matrices needs
no communication (paper, Figure 3a).

Shapes: B batch, S sequence, H hidden, F width between the matrices, T tensor ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.architecture.sublayers import mlp as architecture
from crosscut.config.parts.kinds import FeedForward
from crosscut.kernels.experts import weigh
from crosscut.kernels.functions import run
from crosscut.kernels.gelu import gelu
from crosscut.model.building import Builder


class MLP(nn.Module):
    """MLP of two matrices, `expand` and `contract`: act(x expand) contract. Maps [B, S, H] to [B, S, H] through [B, S,
    F/T].
    """

    def __init__(self, part: architecture.MLP, build: Builder) -> None:
        super().__init__()
        self.runner = build.runner
        self.expand = build.columns(part.expand)
        self.contract = build.rows(part.contract)
        self._activate = ACTIVATIONS[part.kind]

    def forward(self, x: Tensor, *_others: object) -> Tensor:
        """Multiply by the first matrix, apply the activation and multiply by the second matrix."""
        y: Tensor = self.contract(self.runner.cheap(self._activate, self.expand(x)))
        return y

    def inside(self, entered: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute the same inside a parallel region: a summand of the result on each rank, without biases. With
        `weights` [B, S], the result of each token is multiplied by its weight.
        """
        inner = self.expand.inside(entered)
        if weights is None:
            activated = self.runner.cheap(self._activate, inner)
        else:
            activated = self.runner.cheap(partial(weigh, self._activate), weights, inner)
        return self.contract.inside(activated, skips=self.contract.skips_now)


def _relu2(x: Tensor) -> Tensor:
    return run(_SquaredReLU, x, twin=lambda x: F.relu(x).square())


class _SquaredReLU(Function):
    """Autograd function that computes max(x, 0)^2 and keeps only x for the backward pass (So et al. 2021, arXiv
    2109.08668, section 3).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(grad).mul_(2)


ACTIVATIONS: dict[FeedForward, Callable[..., Tensor]] = {
    FeedForward.GELU: gelu,
    FeedForward.GELU_EXACT: F.gelu,
    FeedForward.RELU2: _relu2,
}
"""Activation functions between the two matrices, by the kind of MLP."""
