"""Weights in the order in which oneDNN reads them, for a model that from now on only writes text.

A product of a few tokens takes as long as its weight takes to be read. From plain rows oneDNN gathers blocks at each
product; packed once, blocks lie as they are read. A packed weight takes the plain one's place, since both would be
twice the memory, and nothing but products without gradients can be made of it.

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
"""

from typing import final

import torch
from torch import Tensor, nn

from crosscut.kernels import onednn
from crosscut.kernels.products import IN_BLOCKS, ORDINARY, Products
from crosscut.launch.heap import return_freed_memory
from crosscut.parallel.embedding import VocabParallelOutput
from crosscut.parallel.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import cut_dim, local_part, with_local_part

_PACKABLE = (ColumnParallelLinear, RowParallelLinear, VocabParallelOutput)

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
"""Products with weights that may be packed."""


def pack_weights(model: nn.Module, mesh: ParallelMesh, *, num_texts: int) -> None:
    """Pack a model's linear layers, and an output that is not tied, in place, to write so many texts at once.

    Only on the CPU in float32, where oneDNN is and where data ranks share no weights; and not for so few texts that
    products are faster with plain ones. Otherwise the model is left alone. A packed one may only be run, without
    gradients: it can not be trained, saved or compared. Meanwhile one weight is held twice, the largest at worst.
    """
    layers = [module for module in model.modules() if isinstance(module, _PACKABLE)]
    if not onednn.IS_THERE or num_texts in IN_BLOCKS or mesh.sharding is not None or not all(map(_suits, layers)):
        return
    for layer in layers:
        layer.products = PACKED
        if cut_dim(layer.weight) is not None:  # of one that all ranks hold whole, each multiplies by some rows
            packed = onednn.packed(local_part(layer.weight.detach()), num_tokens=_TOKENS)
            layer.weight = nn.Parameter(with_local_part(layer.weight, packed), requires_grad=False)
            # It is aligned to more than a plain one, and would fit into no hole that one of these has left.
            return_freed_memory()


def _suits(layer: ColumnParallelLinear | RowParallelLinear | VocabParallelOutput) -> bool:
    weight = layer.weight
    return layer.products is ORDINARY and weight.device.type == "cpu" and weight.dtype == torch.float32
