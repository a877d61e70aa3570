r"""The three matrix products of a linear layer, in the precision of the run.

        y = x W^T        grad_x = grad W        grad_W = grad^T x

`ORDINARY` multiplies in the element type of its arguments. `FLOAT8` casts both factors to 8 bits before each product.
Each tensor has one scale, which depends on the tensor's largest element. Activations and weights are cast to e4m3 (4
bits of exponent, 3 of mantissa). Gradients are cast to e5m2, because they need range more than precision (Micikevicius
et al. 2022, section 3).

Scales are powers of two, so casting rounds mantissas only. A rank's shard of a matrix may have a different scale from
that of the whole matrix, because the shard's largest element may be smaller. Normal numbers are nevertheless rounded in
the same way. Only elements below the normal range of the whole matrix can be rounded differently:

| as a fraction of the matrix's largest element | e4m3  | e5m2  |
|-----------------------------------------------|-------|-------|
| smallest element that is always rounded alike | 2^-13 | 2^-28 |
| largest rounding difference below that        | 2^-17 | 2^-31 |

Shapes: N tokens (any leading dimensions), I in, O out.
"""

import math
from abc import ABC, abstractmethod
from copy import copy
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config.precision import FLOAT8_MULTIPLE
from crosscut.kernels import onednn
from crosscut.kernels.deferral import Deferral
from crosscut.kernels.functions import wide_in_compiled_code

FEW = range(1, 33)
"""Numbers of tokens for which a product on the CPU does not use `F.linear` if gradients are off.

Measured in float32 on two cores of an AMD EPYC, with weights of 0.9 to 113 MB. The unit is GB/s of weight data:

| tokens | F.linear | batch of the weight's blocks | oneDNN   |
|--------|----------|------------------------------|----------|
| 1      | 10       | 24                           |          |
| 8      | 6 to 10  |                              | 10 to 14 |
"""

IN_BLOCKS = range(1, 3)
"""Numbers of tokens for which a batch of products, one per block of the weight's rows, is faster than oneDNN."""

_SMALLEST = 1e-12
"""Lower bound for a tensor's largest element, so that a tensor of zeros has a finite scale."""


class Products(ABC):
    """Interface of the three matrix products of a linear layer, in one precision."""

    deferral: Deferral | None = None
    """Deferral of weight gradients. None if every backward pass computes its weight gradients immediately."""

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` [..., I] by `weight` [O, I] and add `bias` [O]: [..., O]."""

    @abstractmethod
    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        """Multiply `grad` [..., O] by `weight` [O, I]: [..., I]. If `onto` is given, add the product to `onto` in place
        and return `onto`.
        """

    @abstractmethod
    def weight_gradient(self, grad: Tensor, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Compute grad^T x [O, I] from `grad` [..., O] and `x` [..., I], summed over all tokens. `dtype` is the element
        type of the weight. None means the type of `grad`.
        """

    def weight_dtype(self, weight: Tensor, dtype: torch.dtype) -> torch.dtype:
        """Return the element type in which a layer passes its weight to the products. `dtype` is the type of the
        products' other arguments. The weight's gradient has the same type.
        """
        del weight
        return dtype


@final
class _Ordinary(Products):
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _are_few(x):
            return _output_of_few(x, weight, bias)
        return onednn.linear(x, weight, bias) if onednn.suits(x, weight) else F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        if onednn.suits(grad, weight.t()):
            product = onednn.linear(grad, weight.t())
            return product if onto is None else onto.add_(product)
        if onto is None:
            return grad @ weight
        onto.view(-1, onto.shape[-1]).addmm_(as_rows(grad), weight)
        return onto

    def weight_gradient(self, grad: Tensor, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        assert dtype in {None, grad.dtype}
        grad, x = as_rows(grad), as_rows(x)
        if onednn.suits(grad.t(), x.t()) and grad.is_contiguous():
            return onednn.weight_gradient(grad, x)
        return grad.t() @ x


@final
class _Float8(Products):
    """Products in 8 bits. The number of tokens is padded to a multiple of `FLOAT8_MULTIPLE`. I and O must be multiples
    of `FLOAT8_MULTIPLE`, which the config checks.

    The forward product accumulates in the native precision of the tensor cores, which is fast. The backward products
    accumulate in higher precision, as in torchao's recipe for training.

    A layer passes its weight in the type in which it is stored. The weight's gradient leaves the product in this type,
    so it is not rounded and cast. The weight itself is rounded to the type of `x` or `grad` before it is cast to 8
    bits.
    """

    def weight_dtype(self, weight: Tensor, dtype: torch.dtype) -> torch.dtype:
        del dtype
        return weight.dtype

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = _multiply(_cast(_rows(x)), _cast(weight.to(x.dtype)), dtype=x.dtype, bias=bias, fast=True)
        return _like(product, x)

    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        product = _multiply(_cast_gradient(grad), _cast(weight.to(grad.dtype)).t(), dtype=grad.dtype)
        product = _like(product, grad)
        return product if onto is None else onto.add_(product)

    def weight_gradient(self, grad: Tensor, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return _multiply(_cast_gradient(grad).t(), _cast(_rows(x)).t(), dtype=dtype or grad.dtype)


ORDINARY: Products = _Ordinary()
"""Products in the element type of the arguments."""

FLOAT8: Products = _Float8()
"""Products in 8 bits. Arguments and results have wider element types, such as bfloat16."""


def deferring(products: Products, deferral: Deferral) -> Products:
    """Return a copy of `products` with a deferral of weight gradients."""
    own = copy(products)
    own.deferral = deferral
    return own


def multiply_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Multiply `x` [..., I] by `weight` [O, I], add `bias` [O] and write the result into `out` [..., O]. `out` must be
    contiguous, have the element type of `x`, and share no memory with the other arguments.
    """
    out, x = out.view(-1, out.shape[-1]), as_rows(x)
    if onednn.suits(x, weight):
        onednn.linear_into(out, x, weight, bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product_in(buffer: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x` [N, I] by `weight` [O, I]: [N, O], in the element type of `x`. If `buffer` has the same element
    type, the result is stored in the first N rows of `buffer`.
    """
    if buffer.dtype == x.dtype:
        out = buffer[: x.shape[0]]
        multiply_into(out, x, weight)
        return out
    return x @ weight.t()


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool = False) -> None:
    """Add a product in place: total [M, K] += a [M, N] @ b [N, K]. With `is_first`, overwrite `total` by a @ b.

    `total` may have a wider element type than `a` and `b`. On a GPU, a float32 sum is then never rounded to their type.
    """
    if total.dtype == a.dtype and onednn.suits(a, b.t()):
        onednn.add_product(total, a, b, is_first=is_first)
    elif total.dtype == a.dtype:
        total.addmm_(a, b, beta=0 if is_first else 1)
    elif adds_in_float32(total):
        torch.addmm(total, a, b, beta=0 if is_first else 1, out_dtype=torch.float32, out=total)
    elif is_first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def adds_in_float32(total: Tensor) -> bool:
    """Whether a product of narrow factors can be added to `total` without a rounded copy of the product. PyTorch has
    such products on GPUs only, and only in float32.
    """
    return total.is_cuda and total.dtype == torch.float32


def as_rows(x: Tensor) -> Tensor:
    """Reshape `x` [..., K] to [N, K]: a view if possible, otherwise a copy."""
    return x.reshape(-1, x.shape[-1])


def bias_gradient(grad: Tensor) -> Tensor:
    """Return the gradient of a bias [O]: the sum over all tokens of `grad` [..., O], the gradient of the layer's
    output.
    """
    return as_rows(grad).sum(0)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the element type in which a layer multiplies `x`: the type that `torch.autocast` sets, or the type of `x`
    if autocast is off or `x` is float64.
    """
    is_cast = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def _are_few(x: Tensor) -> bool:
    """Whether `x` has only a few tokens, as in a decoding step, and gradients are off."""
    return onednn.may_take(x) and x.numel() // x.shape[-1] in FEW


def _output_of_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_tokens, num_blocks = x.numel() // x.shape[-1], _num_blocks(weight)
    if num_tokens in IN_BLOCKS and num_blocks > 1:
        y = _in_blocks(x, weight, num_blocks)
        return y if bias is None else y.add_(bias)
    return onednn.linear(x, weight, bias) if onednn.IS_THERE else F.linear(x, weight, bias)


def _num_blocks(weight: Tensor) -> int:
    """Return the number of blocks into which a weight's rows are divided: a power of two that divides the number of
    rows. If possible, there are at least two blocks, and at least one block for each thread.
    """
    enough = 1 << max(1, (torch.get_num_threads() - 1).bit_length())
    return math.gcd(enough, weight.shape[0])


def _in_blocks(x: Tensor, weight: Tensor, num_blocks: int) -> Tensor:
    """Multiply `x` [..., I] by `weight` [O, I]: [..., O]. The product is computed as a batch of products, one for each
    block of the weight's rows.

    PyTorch's plain product of a matrix and one or two tokens uses a single thread, which cannot use the full memory
    bandwidth. PyTorch's batched product uses all threads.
    """
    num_outputs, num_inputs = weight.shape
    blocks = weight.view(num_blocks, num_outputs // num_blocks, num_inputs)
    columns = x.reshape(-1, num_inputs).t()
    y = torch.bmm(blocks, columns.expand(num_blocks, -1, -1))
    if columns.shape[1] > 1:
        y = y.view(num_outputs, -1).t().contiguous()
    return y.view(*x.shape[:-1], num_outputs)


class _Cast(NamedTuple):
    """Matrix in 8 bits, and the float32 factor by which to multiply the 8-bit values to get the original values back.

    If the original contains NaN or infinity, the factor is NaN, so the result of a product is not finite either.
    """

    values: Tensor
    factor: Tensor

    def t(self) -> "_Cast":
        """Return the transpose, with the same factor."""
        return _Cast(self.values.t(), self.factor)


def _cast(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, along: int = -1) -> _Cast:
    """Cast a tensor to 8 bits, with one scale. The largest elements along one dimension are computed first, then the
    scale: the compiler fuses them with other sums along the same dimension.

    A cast of a matrix and a cast of its transpose would be two casts. Therefore, cast the matrix, and transpose the
    result. In compiled code, the casts of a tensor for several products are then one cast.

    The factor is the result of a reduction, because compiled code keeps such results for the backward pass, and
    computes other results again. The scale depends on the factor only, so both always fit together. They are computed
    from the bits of the largest elements, without the GPU's approximate logarithm. The compiler may store the largest
    elements between two kernels, so they are converted to float32 first.
    """
    largest = wide_in_compiled_code(x).abs().amax(along).float().clamp(min=_SMALLEST)
    # Each 8-bit type has a maximum of the form 1.75 x 2^m. If the mantissa is above 1.75, the sum carries into the
    # exponent.
    exponent = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - math.frexp(torch.finfo(dtype).max)[1] + 1
    # The second term is NaN for NaN and infinity, otherwise 0. The compiler would not recognise equal calls of `where`.
    factor = ((exponent << 23).view(torch.float32) + largest * 0.0).amax()
    scale = ((254 << 23) - factor.view(torch.int32)).view(torch.float32)  # 1 / factor, exact for powers of two
    return _Cast((x * scale).to(dtype), factor)


def _cast_gradient(grad: Tensor) -> _Cast:
    """Cast the gradient [..., O] of a product to 8 bits: [N, O]. The largest elements are computed per column, so that
    one pass computes them and the gradient of the bias.
    """
    return _cast(_rows(grad), torch.float8_e5m2, along=0)


def _multiply(a: _Cast, b: _Cast, *, dtype: torch.dtype, bias: Tensor | None = None, fast: bool = False) -> Tensor:
    """Return A B^T [M, N] in `dtype`, for `a` [M, K] and `b` [N, K]. Both 8-bit matrices are stored row by row, because
    the hardware reads them in this order.
    """
    first, second = a.values.contiguous(), b.values.contiguous().t()
    y: Tensor = torch._scaled_mm(first, second, a.factor, b.factor, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    return y


def _rows(x: Tensor) -> Tensor:
    """Reshape `x` [..., K] to [N, K], and append rows of zeros until N is a multiple of `FLOAT8_MULTIPLE`."""
    rows = as_rows(x)
    missing = -rows.shape[0] % FLOAT8_MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _like(y: Tensor, x: Tensor) -> Tensor:
    """Remove from `y` [N, K] the rows that `_rows` appended, and restore the leading dimensions of `x`."""
    return y[: x.shape[:-1].numel()].reshape(*x.shape[:-1], y.shape[-1])
