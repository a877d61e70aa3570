"""Pooler and classifier of the first token of each sequence, inside a parallel region.

Shapes: B sequences, S tokens of a sequence, H hidden, C logits of a sequence, T tensor ranks. Under sequence
parallelism, hidden states are [B, S/T, H].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers.heads import pooled_head as architecture
from crosscut.model.batch import Batch
from crosscut.model.building import Builder
from crosscut.parallel import ParallelMesh, copy_to_tensor_parallel, reduce_from_tensor_parallel
from crosscut.parallel.state.parameters import local


class PooledHead(nn.Module):
    """Dense layer (the pooler), tanh, dropout and a classifier. Maps [B, H] to [B, C] through [B, H/T].

    The pooler is cut by columns and the classifier by rows, like the matrices of an MLP. Forward: all-reduce of the
    logits. Backward: this head sends nothing, and its caller sums the gradient of the input over the tensor ranks.
    """

    sees_padding = True
    """Whether the first tokens would see padding without a mask, as in bidirectional attention."""

    def __init__(self, part: architecture.PooledHead, build: Builder) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.pooler = build.columns(part.pooler)
        self.dropout = build.dropout(part.dropout, inside=True)
        self.classifier = build.rows(part.classifier)

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Compute the logits [B, C] of the sequences from the last hidden states, outside of a parallel region."""
        del batch
        logits: Tensor = self(copy_to_tensor_parallel(take_summaries(hidden, None, self.mesh), self.mesh.tensor))
        return logits

    def forward(self, first: Tensor) -> Tensor:
        """Compute the logits from the hidden states of the first tokens. Every tensor rank gets the same logits."""
        dtype = first.dtype
        pooled = F.linear(first, self.pooler.own_weight(dtype), self.pooler.own_bias(dtype)).tanh()
        parts = F.linear(self.dropout(pooled), local(self.classifier.weight, dtype))
        summed = reduce_from_tensor_parallel(parts, self.mesh.tensor)
        bias = self.classifier.bias
        return summed if bias is None else summed + local(bias, dtype)


def take_summaries(hidden: Tensor, last: Tensor | None, mesh: ParallelMesh) -> Tensor:
    """Return the hidden states [B, H] of one token of each sequence, the same on every tensor rank. `last` [B] are
    the indexes of these tokens in their sequences; None means the first token of each sequence.

    Under sequence parallelism, the rank that holds a token sends it. Forward: all-reduce. Backward: no communication,
    because every rank already has the same gradient.
    """
    if not mesh.sequence_parallel:
        return hidden[:, 0] if last is None else hidden[torch.arange(len(hidden), device=hidden.device), last]
    num_sequences, length = hidden.shape[:2]
    places = torch.zeros(num_sequences, dtype=torch.long, device=hidden.device) if last is None else last
    places = places - mesh.tensor.rank * length
    is_own = (places >= 0) & (places < length)
    rows = hidden[torch.arange(num_sequences, device=hidden.device), places.clamp(0, length - 1)]
    return reduce_from_tensor_parallel(rows.where(is_own.unsqueeze(1), rows.new_zeros(())), mesh.tensor)
