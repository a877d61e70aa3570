"""RMS normalisation that saves few values for the backward pass (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4).

With s = 1 / sqrt(mean(x^2) + epsilon) and n = x s, over the last dimension H:

    y = n w        grad_w = sum over tokens of grad n        grad_x = (grad w - n mean(grad w n)) s
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext, run

_Saved = tuple[Tensor, Tensor | None, Tensor]
"""Input, weight, and the scale of each token."""


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Divide `x` [..., H] by its root mean square and multiply by `weight` [H]: [..., H], computed in float32 or wider.
    A `weight` of None means ones.

    For the backward pass, only `x`, `weight` and the scale s of each token are saved (see the module's docstring).
    PyTorch's own function runs several kernels on the CPU, and autograd would save the intermediate results of these
    kernels.
    """
    return run(_RMSNormFunction, x, weight, epsilon, twin=_plain)


def _plain(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


class _RMSNormFunction(Function):
    @staticmethod
    def forward(ctx: AutogradContext[_Saved], x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        normal = (wide * scale).to(x.dtype)
        return normal if weight is None else normal.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[_Saved], grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        grad_weight = None
        if weight is not None:
            grad_weight = (grad * normal).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
            grad = grad * weight
        grad_x = (grad - normal * (grad * normal).mean(-1, keepdim=True)) * scale
        return grad_x.to(x.dtype), grad_weight, None
