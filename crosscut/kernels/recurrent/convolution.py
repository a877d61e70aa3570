"""Causal convolution of each channel with a few taps, then SiLU, on one device.

    z_t = bias + sum_k weight_k x_(t - K + 1 + k)        y_t = z_t sigmoid(z_t)

A tap does not reach into another document. The backward pass needs only x, so z is computed again. PyTorch's own
convolution would need two transposes on the CPU, and no documents are possible with it.

Shapes: B batch, S sequence, D channels, K taps.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import AutogradContext, run

_Saved = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Inputs, taps, bias, and the numbers of the documents."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
    """Return SiLU of the convolution of `x` [B, S, D] with the taps `weight` [D, K] and the bias [D]: [B, S, D]. The
    last tap belongs to the token itself. Before the first token, the inputs are 0.

    `documents` [B, S] are the numbers of the tokens' documents. For the backward pass, only the arguments are saved.
    """
    return run(_Convolution, x, weight, bias, documents, twin=_plain)


def convolve_next(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, before: int) -> Tensor:
    """Return SiLU of the convolution of tokens that continue a text: [B, S, D]. `x` [B, `before` + S, D] also has the
    `before` inputs before the tokens, at least K - 1. Autograd cannot differentiate the result.
    """
    z = _of_tokens(x[:, before:], weight, bias)
    for back in range(1, weight.shape[1]):
        z.addcmul_(x[:, before - back : -back], weight[:, -1 - back])
    return F.silu(z, inplace=True)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    z = _of_tokens(x, weight, bias)
    for back in range(1, _num_taps(x, weight)):
        z = z + F.pad(_before(x, back, documents) * weight[:, -1 - back], (0, 0, back, 0))
    return F.silu(z)


def _of_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with the last tap, which belongs to the token itself, plus the bias."""
    return x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])


def _num_taps(x: Tensor, weight: Tensor) -> int:
    """Number of taps that reach a token."""
    return min(weight.shape[1], x.shape[1])


def _before(x: Tensor, back: int, documents: Tensor | None) -> Tensor:
    """Return the inputs that are `back` tokens before the tokens from `back` on: [B, S - back, D]; 0 for a token of
    another document.
    """
    earlier = x[:, :-back]
    return earlier if documents is None else earlier.masked_fill(_is_other(documents, back), 0.0)


def _is_other(documents: Tensor, back: int) -> Tensor:
    """Whether a token `back` tokens before is of another document: [B, S - back, 1]."""
    return (documents[:, back:] != documents[:, :-back]).unsqueeze(-1)


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    z = _of_tokens(x, weight, bias)
    for back in range(1, _num_taps(x, weight)):
        z[:, back:].addcmul_(_before(x, back, documents), weight[:, -1 - back])
    return z


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[_Saved], x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None
    ) -> Any:
        ctx.save_for_backward(x, weight, bias, documents)
        return F.silu(_sums(x, weight, bias, documents), inplace=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[_Saved], grad: Tensor) -> Any:
        x, weight, bias, documents = ctx.saved_tensors
        of_sums = torch.ops.aten.silu_backward(grad, _sums(x, weight, bias, documents))
        of_x, of_weight = of_sums * weight[:, -1], torch.zeros_like(weight)
        of_weight[:, -1] = (of_sums * x).sum((0, 1))
        for back in range(1, _num_taps(x, weight)):
            later = of_sums[:, back:]
            if documents is not None:
                later = later.masked_fill(_is_other(documents, back), 0.0)
            of_x[:, :-back].addcmul_(later, weight[:, -1 - back])
            of_weight[:, -1 - back] = (later * x[:, :-back]).sum((0, 1))
        return of_x, of_weight, None if bias is None else of_sums.sum((0, 1)), None
