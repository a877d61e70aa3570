"""Pack a model's weights into oneDNN's memory order, for a model that will only generate text.

A packed weight replaces the plain weight, because keeping both weights would double the memory. A packed weight
supports only products without gradients (`kernels.packed`).
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
    """Pack a model's weights in place for generating `num_texts` texts at once: the weights of linear layers, and of
    the output layer unless it is tied to the embedding.

    The weights are packed only if the model is on the CPU in float32, oneDNN is available, the weights are not sharded
    over data ranks, and products for `num_texts` texts are faster with packed weights. A packed model only runs without
    gradients, and cannot be trained, saved or compared. During packing, one weight at a time is in memory twice.
    """
    found = (module for module in model.modules() if isinstance(module, _PACKABLE))
    layers = [layer for layer in found if not (isinstance(layer, ColumnParallelLinear) and layer.is_read)]
    if not is_faster_packed(num_texts) or mesh.sharding is not None or not all(map(_suits, layers)):
        return
    for layer in layers:
        layer.products = PACKED
        if cut_dim(layer.weight) is not None:  # a rank uses only some rows of a replicated weight: leave it plain
            own = packed(local_part(layer.weight.detach()))
            layer.weight = nn.Parameter(with_local_part(layer.weight, own), requires_grad=False)
            # A packed weight has a stricter alignment, so it would not fit into memory that a plain weight has freed.
            return_freed_memory()


def _suits(layer: ColumnParallelLinear | RowParallelLinear | VocabParallelOutput) -> bool:
    weight = layer.weight
    return layer.products is ORDINARY and weight.device.type == "cpu" and weight.dtype == torch.float32
