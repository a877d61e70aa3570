"""Products in float32 by oneDNN, on processors where it is faster than the library that PyTorch calls.

PyTorch multiplies float32 on the CPU through Intel's MKL, which on AMD's processors leaves the widest instructions
unused: on two cores of a Zen 5 it attains 0.21 TFLOP/s where oneDNN attains 0.3 to 0.48. PyTorch has both in it, and
calls oneDNN for a linear layer that its compiler has packed; that operator is called here.

It has no backward pass, cannot put its result where the caller wants it, and goes through slow reference code for
weights whose rows or columns do not lie one after the other, so it is asked for only where none of this matters. What
is to be put into, or added to, larger tensors comes in blocks that stay in a core's cache: made whole, the new pages of
a block of logits would cost half of what is gained. And it keeps the code of each shape that it has met, half a
megabyte, so that texts of all lengths would fill gigabytes: numbers of tokens are filled up to a multiple.

Shapes: N tokens (any leading dimensions), I in, O out.
"""

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config.machine import processor_vendor

_LEAST_FLOPS = 1 << 25
"""Floating-point operations from which a product is worth the call of oneDNN, which takes 10 us longer than PyTorch's
own. The gradient of a weight, whose second factor must be transposed, gains from this size on; every other product
from a quarter of it."""

_BLOCK_ELEMENTS = 1 << 18
"""Elements of a block, 1 MiB: chosen from measurements of 128 KiB to 8 MiB, at 166, 333 and 666 tokens and a
vocabulary of 50,304."""

_BLOCK_MULTIPLE = 64
"""Rows of a block are a multiple of this."""

_TOKENS_MULTIPLE = 64
"""Tokens of a product are filled up to a multiple of this, where they are more than half of it."""

IS_THERE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)
"""Whether PyTorch has what its own compiler calls for linear layers on the CPU."""


@cache
def is_faster() -> bool:
    """Whether oneDNN is there and the processor is AMD's with AVX-512, which MKL does not use there.

    Measured on a Zen 5, and on a Zen 4, where it is 1.1 to 1.2 times as fast. Without AVX-512 oneDNN was 1.1 times as
    fast forward and no faster for a weight's gradient.
    """
    return IS_THERE and processor_vendor() == "AuthenticAMD" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def may_take(x: Tensor) -> bool:
    """Whether a product of `x` may run elsewhere than in `F.linear`: float32 on the CPU, no gradients, not compiled."""
    return (
        not torch.compiler.is_compiling()  # a compiler calls oneDNN itself; first, so that it traces no more
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of [..., I] and [O, I] is one to ask for here."""
    return (
        may_take(x)
        and weight.dtype == x.dtype
        and 2 * x.numel() * weight.shape[0] >= _LEAST_FLOPS
        and is_faster()
        and (weight.is_contiguous() or weight.t().is_contiguous())
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] and [O, I] and [O] to [..., O], without gradients; the weight may be a `packed` one."""
    num_tokens = x.shape[:-1].numel()
    missing = -num_tokens % _TOKENS_MULTIPLE if num_tokens > _TOKENS_MULTIPLE // 2 else 0
    if not missing:
        return _linear(x, weight, bias)
    y = _linear(F.pad(x.reshape(num_tokens, x.shape[-1]), (0, 0, 0, missing)), weight, bias)
    return y[:num_tokens].view(*x.shape[:-1], y.shape[-1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[N, O] and [N, I], both without gaps, to grad^T x [O, I].

    The operator's first factor is to lie row by row, so one of the two is copied column by column, which takes as long
    as a good part of the product. Where the other one and the result have fewer elements than `grad`, they are turned.
    """
    (num_tokens, num_outputs), num_inputs = grad.shape, x.shape[1]
    if (num_tokens + num_outputs) * num_inputs < num_tokens * num_outputs:
        return _linear(x.t(), grad.t(), None).t().contiguous()
    return _linear(grad.t(), x.t(), None)


def packed(weight: Tensor, *, num_tokens: int) -> Tensor:
    """A weight [O, I] in the order in which a product with so many tokens is to read it; good for `linear` alone."""
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens)
    return result


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Put the product of [N, I] and [O, I], and [O], into `out` [N, O]."""
    if not weight.is_contiguous():  # a block of its rows would have gaps
        out.copy_(linear(x, weight, bias))
        return
    for rows in _blocks(weight.shape[0], width=x.shape[0]):
        out[:, rows].copy_(linear(x, weight[rows], None if bias is None else bias[rows]))


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """Add the product of [O, N] and [N, I] to `total` [O, I], or put it there where the total has no values yet.

    The operator copies a first factor that does not lie row by row, in this case column by column; where the columns
    have gaps, that takes up to seven times as long as to close these first.
    """
    for rows in _blocks(a.shape[0], width=max(b.shape)):  # of the result, and of what is copied of the first factor
        product = _linear(a[rows].t().contiguous().t(), b.t(), None)
        if is_first:
            total[rows].copy_(product)
        else:
            total[rows].add_(product)


def _blocks(num_rows: int, *, width: int) -> Iterator[slice]:
    """All rows, a block after the other, of a matrix as wide as this; of a small one a quarter at a time."""
    step = max(min(_BLOCK_ELEMENTS // width, num_rows // 4) // _BLOCK_MULTIPLE, 1) * _BLOCK_MULTIPLE
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
