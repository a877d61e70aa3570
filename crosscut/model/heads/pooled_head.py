"""Pooler and classifier of the first token of each sequence, inside a parallel region.

Shapes: B sequences, H hidden, C logits of a sequence, T tensor ranks.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers import pooled_head as architecture
from crosscut.model.building import Builder
from crosscut.parallel import reduce_from_tensor_parallel
from crosscut.parallel.state.parameters import local


class PooledHead(nn.Module):
    """Dense layer (the pooler), tanh, dropout and a classifier. Maps [B, H] to [B, C] through [B, H/T].

    The pooler is cut by columns and the classifier by rows, like the matrices of an MLP. Forward: all-reduce of the
    logits. Backward: this head sends nothing, and its caller sums the gradient of the input over the tensor ranks.
    """

    def __init__(self, part: architecture.PooledHead, build: Builder) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.pooler = build.columns(part.pooler)
        self.dropout = build.dropout(part.dropout, inside=True)
        self.classifier = build.rows(part.classifier)

    def forward(self, first: Tensor) -> Tensor:
        """Compute the logits from the hidden states of the first tokens. Every tensor rank gets the same logits."""
        dtype = first.dtype
        pooled = F.linear(first, self.pooler.own_weight(dtype), self.pooler.own_bias(dtype)).tanh()
        parts = F.linear(self.dropout(pooled), local(self.classifier.weight, dtype))
        summed = reduce_from_tensor_parallel(parts, self.mesh.tensor)
        bias = self.classifier.bias
        return summed if bias is None else summed + local(bias, dtype)
