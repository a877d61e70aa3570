"""Heads of a BERT, inside the parallel region that f (`enter_tensor_parallel`) has entered.

Shapes: N tokens to predict, B sequences, H hidden, V vocabulary, T tensor ranks.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers import masked_head as architecture
from crosscut.config import IGNORED
from crosscut.model.building import Builder
from crosscut.parallel import ReplicatedLinear, reduce_from_tensor_parallel, sharded_parameter
from crosscut.parallel.state.parameters import local


class MaskedPrediction(nn.Module):
    """Dense layer, GeLU and norm before the output projection, and the bias of the logits: [N, H] to [N, H]."""

    def __init__(self, part: architecture.MaskedPrediction, build: Builder) -> None:
        super().__init__()
        place: Any = {"mesh": build.mesh, "dtype": build.dtype}
        self.dense = ReplicatedLinear(part.dense.in_features, part.dense.out_features, **place)
        self.norm = build.region_norm(part.norm)
        shape, axis = part.bias.padded_shape(build.mesh.tensor.size), build.mesh.tensor
        self.bias = sharded_parameter(shape, axis, dim=0, dtype=build.dtype, device=build.mesh.parameter_device)
        self._mesh = build.mesh

    def forward(self, entered: Tensor) -> Tensor:
        """Compute the hidden states that the output projection multiplies."""
        y: Tensor = self.norm(F.gelu(self.dense(entered)))
        return y


class SentenceOrder(nn.Module):
    """Head that predicts whether two segments are in the order of their text (0) or swapped (1).

    The pooler is cut by columns and the classifier by rows, like the matrices of an MLP: [B, H] to [B, 2] through
    [B, H/T].
    """

    def __init__(self, part: architecture.SentenceOrder, build: Builder) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.pooler = build.columns(part.pooler)
        self.classifier = build.rows(part.classifier)

    def forward(self, first: Tensor) -> Tensor:
        """Compute the logits of both orders from the hidden states of the first tokens, inside a parallel region."""
        dtype = first.dtype
        pooled = F.linear(first, self.pooler.own_weight(dtype), self.pooler.own_bias(dtype)).tanh()
        parts = F.linear(pooled, local(self.classifier.weight, dtype))
        summed = reduce_from_tensor_parallel(parts, self.mesh.tensor)
        bias = self.classifier.bias
        return summed if bias is None else summed + local(bias, dtype)


def order_loss(logits: Tensor, order: Tensor) -> Tensor:
    """Sum of the cross entropies of `order` [B] given `logits` [B, 2], in float32 or wider. Sequences whose order is
    `IGNORED` add nothing.
    """
    wide = logits.float() if logits.element_size() < 4 else logits
    return F.cross_entropy(wide, order, reduction="sum", ignore_index=IGNORED)
