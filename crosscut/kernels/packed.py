"""Weights in the order in which oneDNN reads them, and the products with them.

A product of a few tokens takes as long as reading its weight. From plain rows oneDNN gathers blocks at each product; in
a packed weight the blocks lie in the order in which they are read. A packed weight has no backward pass.

Measured in float32 on two cores of an AMD EPYC in Llama weights of 0.9 to 3.5 MB, as GB/s of the weight and, with 512
tokens, Gflop/s; the second time oneDNN and MKL are held to AVX2.

| tokens |       | F.linear   | blocks of plain rows | oneDNN, plain | oneDNN, packed |
|--------|-------|------------|----------------------|---------------|----------------|
| 1      |       | 16 to 18   | 40 to 48             | 24 to 40      | 32 to 45       |
| 8      |       | 10 to 12   | 11 to 18             | 19 to 24      | 27 to 38       |
| 512    |       | 205 to 218 |                      | 460 to 481    | 490 to 498     |
| 1      | AVX2  |            | 41 to 43             | 24 to 41      | 31 to 34       |
| 8      | AVX2  | 13 to 14   | 11 to 18             | 14 to 17      | 21 to 25       |
| 512    | AVX2  | 207 to 214 |                      | 238 to 244    | 252 to 253     |

Shapes: I in, O out.
"""

from typing import final

from torch import Tensor

from crosscut.kernels import onednn
from crosscut.kernels.products import IN_BLOCKS, Products

_TOKENS = 8
"""Number of tokens that a packed weight is to suit. oneDNN packs alike for other numbers, and is as fast."""

_NO_GRADIENT = (
    "A model must have plain weights where a gradient is asked for, but `pack_weights` has packed this one's to write "
    "text. Load it again."
)


@final
class _Packed(Products):
    """Products by oneDNN, with packed and with plain weights."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return onednn.linear(x, weight, bias)

    def input_gradient(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError(_NO_GRADIENT)

    def weight_gradient(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError(_NO_GRADIENT)


PACKED: Products = _Packed()
"""Products with weights that may be packed, by oneDNN."""


def is_faster_packed(num_tokens: int) -> bool:
    """Whether oneDNN is there and a product of so many tokens is faster with a packed weight than with a plain one."""
    return onednn.IS_THERE and num_tokens not in IN_BLOCKS


def packed(weight: Tensor) -> Tensor:
    """A copy of a float32 weight [O, I] on the CPU in oneDNN's order; only the products of `PACKED` can read it."""
    return onednn.packed(weight, num_tokens=_TOKENS)
