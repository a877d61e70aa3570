"""Float32 products by oneDNN, on processors where it is faster than the library that PyTorch calls.

PyTorch multiplies float32 on the CPU with Intel's MKL, which does not use the widest instructions of AMD processors: on
two cores of a Zen 5 it reaches 0.21 TFLOP/s, while oneDNN reaches 0.3 to 0.48. PyTorch includes both libraries, and its
compiler uses oneDNN for linear layers. This module calls the same operator.

The operator has limits, so it is used only where they do not matter:

- It has no backward pass.
- It cannot write its result into a given tensor. Results that go into larger tensors, or are added to them, are
  computed in blocks that fit into a core's cache; a whole result would need new memory pages, which for a block of
  logits cost half of the gain.
- It runs slow reference code for weights whose rows or columns are not contiguous.
- It keeps 500 KB of code for each shape, so texts of many lengths would fill gigabytes. Numbers of tokens are therefore
  padded to a multiple.

Shapes: N tokens (any leading dimensions), I in, O out.
"""

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config.machine import processor_vendor

_LEAST_FLOPS = 1 << 25
"""Minimum number of floating-point operations for which oneDNN is called; a call takes 10 us longer than PyTorch's own.
The gradient of a weight, whose second factor must be transposed, gains from this size on. All other products gain from
a quarter of this size on.
"""

_BLOCK_ELEMENTS = 1 << 18
"""Number of elements of a block (1 MiB), chosen from measurements of 128 KiB to 8 MiB at 166, 333 and 666 tokens and a
vocabulary of 50,304.
"""

_BLOCK_MULTIPLE = 64
"""The number of rows in a block is a multiple of this."""

_TOKENS_MULTIPLE = 64
"""Numbers of tokens above half of this are padded to a multiple of this."""

IS_THERE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)
"""Whether PyTorch has the operators that its own compiler calls for linear layers on the CPU."""


@cache
def is_faster() -> bool:
    """Whether oneDNN is available and faster: on AMD processors with AVX-512, which MKL does not use there.

    Measured on a Zen 5, and on a Zen 4, where oneDNN is 1.1 to 1.2 times as fast. Without AVX-512, oneDNN was 1.1 times
    as fast in the forward pass and no faster for a weight's gradient.
    """
    return IS_THERE and processor_vendor() == "AuthenticAMD" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def may_take(x: Tensor) -> bool:
    """Whether another library than `F.linear`'s may multiply `x`: float32 on the CPU, without gradients and not
    compiled.
    """
    return (
        not torch.compiler.is_compiling()  # tested first, so that a compiler, which calls oneDNN itself, traces no more
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN should compute the product of `x` [..., I] and `weight` [O, I]."""
    return (
        may_take(x)
        and weight.dtype == x.dtype
        and 2 * x.numel() * weight.shape[0] >= _LEAST_FLOPS
        and is_faster()
        and (weight.is_contiguous() or weight.t().is_contiguous())
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply [..., I] by [O, I] and add [O]: [..., O], without gradients. The weight may be `packed`."""
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
    """Compute grad^T x [O, I] from [N, O] and [N, I], both contiguous.

    The operator needs its first factor row by row, so it copies one factor column by column, which takes a good part of
    the product's time. If the other factor and the result together have fewer elements than `grad`, the transposed
    product is computed instead.
    """
    (num_tokens, num_outputs), num_inputs = grad.shape, x.shape[1]
    if (num_tokens + num_outputs) * num_inputs < num_tokens * num_outputs:
        return _linear(x.t(), grad.t(), None).t().contiguous()
    return _linear(grad.t(), x.t(), None)


def packed(weight: Tensor, *, num_tokens: int) -> Tensor:
    """Reorder a weight [O, I] for products with about `num_tokens` tokens. Only `linear` can read the result."""
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens)
    return result


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write the product of [N, I] and [O, I], plus [O], into `out` [N, O]."""
    if not weight.is_contiguous():  # a block of its rows would not be contiguous in either direction
        out.copy_(linear(x, weight, bias))
        return
    for rows in _blocks(weight.shape[0], width=x.shape[0]):
        out[:, rows].copy_(linear(x, weight[rows], None if bias is None else bias[rows]))


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """Add the product of [O, N] and [N, I] to `total` [O, I]; with `is_first`, overwrite `total`.

    The operator copies a first factor that is not stored row by row. Here it would copy column by column; if the
    columns have gaps, copying them into contiguous memory first is up to seven times as fast.
    """
    for rows in _blocks(a.shape[0], width=max(b.shape)):  # limits both the result and the copy of the first factor
        product = _linear(a[rows].t().contiguous().t(), b.t(), None)
        if is_first:
            total[rows].copy_(product)
        else:
            total[rows].add_(product)


def _blocks(num_rows: int, *, width: int) -> Iterator[slice]:
    """Yield the rows of a matrix of this width in blocks. A small matrix is cut into quarters."""
    step = max(min(_BLOCK_ELEMENTS // width, num_rows // 4) // _BLOCK_MULTIPLE, 1) * _BLOCK_MULTIPLE
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
