"""Heads that solve a task for a whole text: classes, number, choice and spans (`architecture.sublayers.task_head`).

Shapes: B sequences, S tokens of a sequence, H hidden, C logits, T tensor ranks. Under sequence parallelism, hidden
states are [B, S/T, H].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture import Matrix
from crosscut.architecture.sublayers import task_head as architecture
from crosscut.config import IGNORED
from crosscut.model.building import Builder
from crosscut.model.heads.pooled_head import PooledHead
from crosscut.parallel import (
    ParallelMesh,
    copy_to_tensor_parallel,
    join_from_sequence_parallel,
    local_on_sequence,
    reduce_from_tensor_parallel,
    replicated_parameter,
)
from crosscut.parallel.state.parameters import local


class SummaryHead(nn.Module):
    """Classifier of summaries, which maps [B, H] to [B, C]. A summary is the hidden state of one token of a sequence.
    Every rank computes all logits and sends nothing.
    """

    def __init__(self, matrix: Matrix, build: Builder) -> None:
        super().__init__()
        self.classifier = _Classifier(matrix, build)

    def forward(self, summaries: Tensor) -> Tensor:
        """Compute the logits from summaries that are the same on every rank."""
        return F.linear(summaries, local(self.classifier.weight, summaries.dtype))


class TokenHead(nn.Module):
    """Classifier of every token, which maps [B, S, H] to [B, S, C].

    Under sequence parallelism, each rank computes the logits of its own tokens. Forward: all-gather of the logits.
    Backward: no communication, because every rank computes the whole loss. The gradients of the weight on different
    ranks come from different tokens; they are summed over the tensor ranks once per step.
    """

    def __init__(self, matrix: Matrix, build: Builder) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.classifier = _Classifier(matrix, build)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the logits from the last hidden states. Every tensor rank gets the logits of all tokens."""
        weight = local_on_sequence(self.classifier.weight, self.mesh, hidden.dtype)
        bias = self.classifier.bias
        own = F.linear(hidden, weight, None if bias is None else local_on_sequence(bias, self.mesh, hidden.dtype))
        return join_from_sequence_parallel(own, self.mesh.tensor) if self.mesh.sequence_parallel else own


class _Classifier(nn.Module):
    """Weight [C, H] and bias [C] of a classifier, whole on every rank."""

    def __init__(self, matrix: Matrix, build: Builder) -> None:
        super().__init__()
        axis, dtype, device = build.mesh.tensor, build.dtype, build.mesh.parameter_device
        self.weight = replicated_parameter(matrix.weight.shape, axis, dtype=dtype, device=device)
        self.bias = None
        if matrix.bias is not None:
            self.bias = replicated_parameter(matrix.bias.shape, axis, dtype=dtype, device=device)


TaskHead = PooledHead | SummaryHead | TokenHead


def build_task_head(part: architecture.TaskHead, build: Builder) -> TaskHead:
    """Build the head of a model that solves a task."""
    if part.pooled is not None:
        return PooledHead(part.pooled, build)
    if part.of_tokens is not None:
        return TokenHead(part.of_tokens, build)
    assert part.of_summaries is not None
    return SummaryHead(part.of_summaries, build)


def task_logits(head: TaskHead, hidden: Tensor, last: Tensor | None, mesh: ParallelMesh) -> Tensor:
    """Compute the logits of a task from the last hidden states: [B, C], or [B, S, C] for a head of tokens.

    `last` [B] are the indexes of the summaries in their sequences; None means that the first tokens are the summaries.
    """
    if isinstance(head, TokenHead):
        logits: Tensor = head(hidden)
        return logits
    summaries = take_summaries(hidden, last, mesh)
    if isinstance(head, PooledHead):
        summaries = copy_to_tensor_parallel(summaries, mesh.tensor)
    of_summaries: Tensor = head(summaries)
    return of_summaries


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


def last_places(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Return, for each sequence, the index [B] of the last token that is not padding. `mask` [B, S] is false for
    padding; None means that there is no padding. If a sequence consists only of padding, the index is 0.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    shown = places.expand_as(tokens) if mask is None else places * mask
    return shown.amax(1)


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of `labels`, in float32 or wider. Labels that are missing add nothing: `IGNORED`, or
    NaN for numbers.

    Logits [B, C] have labels [B], and the loss is their cross entropy. Labels in floating point are numbers, which the
    logits [B, 1] predict; the loss is the squared difference. Logits of spans [B, S, 2] have labels [B, 2], the indexes
    of the first and of the last token of the answer; a sequence adds the mean of both cross entropies.
    """
    wide = logits.float() if logits.element_size() < 4 else logits
    if labels.is_floating_point():
        numbers = labels.to(wide.dtype)
        return torch.where(numbers.isnan(), 0.0, wide.squeeze(1) - numbers).square().sum()
    if wide.dim() == 2:
        return F.cross_entropy(wide, labels, reduction="sum", ignore_index=IGNORED)
    return F.cross_entropy(wide, labels, reduction="sum", ignore_index=IGNORED) / 2
