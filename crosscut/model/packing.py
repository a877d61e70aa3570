"""Packing of a model's weights in the order in which oneDNN reads them, for a model that from now on only writes text.

A packed weight takes the plain one's place, since both would be twice the memory, and nothing but products without
gradients can be made of it (`kernels.packed`).
"""

import torch
from torch import nn

from crosscut.kernels.packed import PACKED, is_faster_packed, packed
from crosscut.kernels.products import ORDINARY
from crosscut.launch.heap import return_freed_memory
from crosscut.parallel.embedding import VocabParallelOutput
from crosscut.parallel.linear import ColumnParallelLinear, RowParallelLinear
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import cut_dim, local_part, with_local_part

_PACKABLE = (ColumnParallelLinear, RowParallelLinear, VocabParallelOutput)


def pack_weights(model: nn.Module, mesh: ParallelMesh, *, num_texts: int) -> None:
    """Pack a model's linear layers, and an output that is not tied, in place, to write so many texts at once.

    Only on the CPU in float32, where oneDNN is and where data ranks share no weights; and not for so few texts that
    products are faster with plain ones. Otherwise the model is left alone. A packed one may only be run, without
    gradients: it can not be trained, saved or compared. Meanwhile one weight is held twice, the largest at worst.
    """
    layers = [module for module in model.modules() if isinstance(module, _PACKABLE)]
    if not is_faster_packed(num_texts) or mesh.sharding is not None or not all(map(_suits, layers)):
        return
    for layer in layers:
        layer.products = PACKED
        if cut_dim(layer.weight) is not None:  # of one that all ranks hold whole, each multiplies by some rows
            own = packed(local_part(layer.weight.detach()))
            layer.weight = nn.Parameter(with_local_part(layer.weight, own), requires_grad=False)
            # It is aligned to more than a plain one, and would fit into no hole that one of these has left.
            return_freed_memory()


def _suits(layer: ColumnParallelLinear | RowParallelLinear | VocabParallelOutput) -> bool:
    weight = layer.weight
    return layer.products is ORDINARY and weight.device.type == "cpu" and weight.dtype == torch.float32
