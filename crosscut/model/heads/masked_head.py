"""BERT's head for masked tokens, and the loss for the order of two segments. The head runs inside the parallel region
that f (`enter_tensor_parallel`) enters.

Shapes: N tokens to predict, B sequences, H hidden, V vocabulary.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers import masked_head as architecture
from crosscut.config import IGNORED
from crosscut.model.building import Builder
from crosscut.parallel import ReplicatedLinear, sharded_parameter


class MaskedPrediction(nn.Module):
    """Dense layer, GeLU and norm before the output projection, and the bias of the logits. Maps [N, H] to [N, H]."""

    def __init__(self, part: architecture.MaskedPrediction, build: Builder) -> None:
        super().__init__()
        place: Any = {"mesh": build.mesh, "dtype": build.dtype}
        self.dense = ReplicatedLinear(part.dense.in_features, part.dense.out_features, **place)
        self.norm = build.region_norm(part.norm)
        shape, axis = part.bias.padded_shape(build.mesh.tensor.size), build.mesh.tensor
        self.bias = sharded_parameter(shape, axis, dim=0, dtype=build.dtype, device=build.mesh.parameter_device)

    def forward(self, entered: Tensor) -> Tensor:
        """Compute the hidden states to which the output projection is applied."""
        y: Tensor = self.norm(F.gelu(self.dense(entered)))
        return y


def order_loss(logits: Tensor, order: Tensor) -> Tensor:
    """Return the sum of the cross entropies of `order` [B] given `logits` [B, 2], in float32 or wider. Sequences whose
    order is `IGNORED` add nothing.
    """
    wide = logits.float() if logits.element_size() < 4 else logits
    return F.cross_entropy(wide, order, reduction="sum", ignore_index=IGNORED)
