"""Weights in the memory order in which oneDNN reads them, and products with such packed weights.

A product with few tokens takes as long as reading the weight from memory. From a plain weight, oneDNN gathers blocks
for each product. In a packed weight, the blocks are already stored in the order in which oneDNN reads them. A model
with packed weights cannot compute gradients.

The table shows measurements in float32 on two cores of an AMD EPYC, with Llama weights of 0.9 to 3.5 MB. For 1 and 8
tokens, the unit is GB/s of weight data; for 512 tokens, it is GFLOP/s. In the rows marked AVX2, oneDNN and MKL are
limited to AVX2. "Batched" is a batch of products, one for each block of the weight's rows. The module `products` uses
this method for one or two tokens.

| tokens |       | F.linear   | batched              | oneDNN, plain | oneDNN, packed |
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
"""Number of tokens that is passed to oneDNN when a weight is packed. Products with other numbers of tokens are equally
fast, because oneDNN packs a weight in the same way for every number of tokens.
"""

_NO_GRADIENT = (
    "A model needs plain weights to compute gradients, but this model's weights were packed by `pack_weights` to "
    "generate text. Load the model again."
)


@final
class _Packed(Products):
    """Products with oneDNN. Weights may be packed or plain."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return onednn.linear(x, weight, bias)

    def input_gradient(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError(_NO_GRADIENT)

    def weight_gradient(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError(_NO_GRADIENT)


PACKED: Products = _Packed()
"""Products with oneDNN. Weights may be packed or plain. Computing gradients raises `RuntimeError`."""


def is_faster_packed(num_tokens: int) -> bool:
    """Whether a product with this number of tokens is faster with a packed weight than with a plain weight. False if
    oneDNN is not available.
    """
    return onednn.IS_THERE and num_tokens not in IN_BLOCKS


def packed(weight: Tensor) -> Tensor:
    """Copy a float32 CPU weight [O, I] into the memory order in which oneDNN reads it. Only the products of `PACKED`
    can read the copy.
    """
    return onednn.packed(weight, num_tokens=_TOKENS)
