"""RMS normalisation that saves few values for the backward pass (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4).

With s = 1 / sqrt(mean(x^2) + epsilon) and n = x s, over the last dimension H:

    y = n w        grad_w = sum over tokens of grad n        grad_x = (grad w - n mean(grad w n)) s

The weight may be stored as its offset w - 1, as in Qwen3-Next.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext, run

_Saved = tuple[Tensor, Tensor | None, Tensor]
"""Input, weight, and the scale of each token."""


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, *, has_offset: bool = False) -> Tensor:
    """Divide `x` [..., H] by its root mean square and multiply by `weight` [H], or with `has_offset` by 1 + `weight`:
    [..., H], computed in float32 or wider. A `weight` of None means ones.

    For the backward pass, only `x`, `weight` and the scale s of each token are saved (see the module's docstring).
    PyTorch's own function runs several kernels on the CPU, and autograd would save the intermediate results of these
    kernels.
    """
    return run(_RMSNormFunction, x, weight, epsilon, has_offset, twin=_plain)


def _plain(x: Tensor, weight: Tensor | None, epsilon: float, has_offset: bool) -> Tensor:
    if weight is None or not has_offset:
        return F.rms_norm(x, x.shape[-1:], weight, epsilon)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.rms_norm(wide, x.shape[-1:], None, epsilon) * _factor(weight, wide)).to(x.dtype)


def _factor(offset: Tensor, wide: Tensor) -> Tensor:
    """Return the weight w from its offset, in the type of `wide`. Near 1, a narrow type has fewer digits than near
    0.
    """
    return 1.0 + offset.to(wide.dtype)


class _Context(AutogradContext[_Saved]):
    has_offset: bool


class _RMSNormFunction(Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor | None, epsilon: float, has_offset: bool) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.has_offset = has_offset
        if weight is not None and has_offset:
            return (wide * scale).mul_(_factor(weight, wide)).to(x.dtype)
        normal = (wide * scale).to(x.dtype)
        return normal if weight is None else normal.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        grad_weight = None
        if weight is not None:
            grad_weight = (grad * normal).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
            grad = grad * (_factor(weight, scale) if ctx.has_offset else weight)
        grad_x = (grad - normal * (grad * normal).mean(-1, keepdim=True)) * scale
        return grad_x.to(x.dtype), grad_weight, None, None
