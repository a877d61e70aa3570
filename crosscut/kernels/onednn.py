"""Float32 matrix products with oneDNN, on processors where oneDNN is faster than the library that PyTorch calls.

PyTorch multiplies float32 on the CPU with Intel's MKL, which does not use the widest instructions of AMD processors. On
two cores of a Zen 5, MKL reaches 0.21 TFLOP/s, and oneDNN reaches 0.3 to 0.48 TFLOP/s. PyTorch includes both libraries,
and `torch.compile` uses oneDNN for linear layers. This module calls the operator that `torch.compile` uses.

The operator has four limits. This module avoids or works around each limit:

- The operator has no backward pass. It is called only when gradients are off.
- The operator cannot write its result into a given tensor. If a result is to be written into a larger tensor or added
  to another tensor, it is therefore computed in blocks that fit into a core's cache. (Computing the whole result at
  once would need new memory pages. For a chunk of logits, these pages would cost half of the speed gain.)
- The operator runs slow reference code if neither the rows nor the columns of the weight are contiguous. Such products
  go to PyTorch's own library.
- The operator keeps 500 KB of code for each shape. Texts of many lengths would fill gigabytes, so the number of tokens
  is padded to a multiple.

Shapes: N tokens (any leading dimensions), I in, O out.
"""

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config.system.machine import processor_vendor

_LEAST_FLOPS = 1 << 25
"""Minimum number of floating-point operations for which oneDNN is used. A call has 10 us more overhead than PyTorch's
own product. For products of this size or more, oneDNN is faster even if it has to make a transposed copy, as for a
weight's gradient. Without the copy, oneDNN is already faster for a quarter of this size.
"""

_BLOCK_ELEMENTS = 1 << 18
"""Maximum number of elements in a block (1 MiB). This was the fastest of the measured sizes from 128 KiB to 8 MiB, with
166, 333 and 666 tokens and a vocabulary of 50,304.
"""

_BLOCK_MULTIPLE = 64
"""The number of rows in a block is a multiple of `_BLOCK_MULTIPLE`."""

_TOKENS_MULTIPLE = 64
"""Numbers of tokens above half of `_TOKENS_MULTIPLE` are padded to a multiple of `_TOKENS_MULTIPLE`."""

IS_THERE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)
"""Whether this build of PyTorch has oneDNN and the two operators that this module calls."""


@cache
def is_faster() -> bool:
    """Whether oneDNN is available and faster than MKL. This holds on AMD processors with AVX-512, because MKL does not
    use AVX-512 on AMD processors.

    The module's docstring has the measurements on a Zen 5. On a Zen 4, oneDNN is 1.1 to 1.2 times as fast as MKL.
    Without AVX-512, oneDNN is 1.1 times as fast in the forward pass, and no faster for a weight's gradient.
    """
    return IS_THERE and processor_vendor() == "AuthenticAMD" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def may_take(x: Tensor) -> bool:
    """Whether products of `x` may be computed without PyTorch's `F.linear`. True if `x` is float32 on the CPU,
    gradients are off, and `torch.compile` is not tracing the code.
    """
    return (
        not torch.compiler.is_compiling()  # tested first, so that a compiler does not trace the rest
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes the product of `x` [..., I] and `weight` [O, I] faster than PyTorch's own library."""
    return (
        may_take(x)
        and weight.dtype == x.dtype
        and 2 * x.numel() * weight.shape[0] >= _LEAST_FLOPS
        and is_faster()
        and (weight.is_contiguous() or weight.t().is_contiguous())
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` [..., I] by `weight` [O, I] and add `bias` [O]: [..., O]. Autograd cannot differentiate the result.
    `weight` may be a result of `packed`.
    """
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
    """Compute grad^T x [O, I] from `grad` [N, O] and `x` [N, I]. Both arguments must be contiguous.

    oneDNN makes a transposed copy of the first factor, which takes a considerable part of the product's time. If `x`
    and the result together have fewer elements than `grad`, it is cheaper to copy `x` and to transpose the result: the
    function then computes x^T grad and returns its transpose.
    """
    (num_tokens, num_outputs), num_inputs = grad.shape, x.shape[1]
    if (num_tokens + num_outputs) * num_inputs < num_tokens * num_outputs:
        return _linear(x.t(), grad.t(), None).t().contiguous()
    return _linear(grad.t(), x.t(), None)


def packed(weight: Tensor, *, num_tokens: int) -> Tensor:
    """Copy a weight [O, I] into the memory order that oneDNN reads fastest for products with about `num_tokens` tokens.
    Only `linear` can read the copy.
    """
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens)
    return result


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Multiply `x` [N, I] by `weight` [O, I], add `bias` [O] and write the result into `out` [N, O]."""
    if not weight.is_contiguous():  # a block of rows would not be contiguous in either direction
        out.copy_(linear(x, weight, bias))
        return
    for rows in _blocks(weight.shape[0], width=x.shape[0]):
        out[:, rows].copy_(linear(x, weight[rows], None if bias is None else bias[rows]))


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """Add the product of `a` [O, N] and `b` [N, I] to `total` [O, I], in place. With `is_first`, overwrite `total`.

    `a` is usually a transposed view. oneDNN copies such a view slowly, so this function itself copies a block of `a`
    into contiguous memory before each product. If the view has gaps in memory, this makes the function up to seven
    times as fast.
    """
    for rows in _blocks(a.shape[0], width=max(b.shape)):  # limits both the result and the copy of the first factor
        product = _linear(a[rows].t().contiguous().t(), b.t(), None)
        if is_first:
            total[rows].copy_(product)
        else:
            total[rows].add_(product)


def _blocks(num_rows: int, *, width: int) -> Iterator[slice]:
    """Divide a matrix of `num_rows` rows and `width` columns into blocks of rows, and yield the rows of each block. A
    block has about `_BLOCK_ELEMENTS` elements. A small matrix is divided into quarters.
    """
    step = max(min(_BLOCK_ELEMENTS // width, num_rows // 4) // _BLOCK_MULTIPLE, 1) * _BLOCK_MULTIPLE
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
