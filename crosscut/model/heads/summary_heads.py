"""Heads that read one token of each text, its summary: classes, number and choice. The summary is the first token in
bidirectional attention, and the last token that is not padding in causal attention.

Shapes: B sequences, S tokens of a sequence, H hidden, C logits, T tensor ranks. Under sequence parallelism, hidden
states are [B, S/T, H].
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers.heads import summary_heads as architecture
from crosscut.architecture.sublayers.heads.pooled_head import PooledHead as PooledPart
from crosscut.architecture.sublayers.heads.task_head import NAME
from crosscut.model.batch import Batch
from crosscut.model.building import Builder
from crosscut.model.heads.head import HeadBuilder
from crosscut.model.heads.pooled_head import PooledHead, take_summaries
from crosscut.model.heads.task_head import Classifier, TaskHead, cross_entropies
from crosscut.parallel.state.parameters import local


class SummaryHead(TaskHead[architecture.SummaryHead], ABC):
    """Head that reads the summaries of texts."""

    def __init__(self, part: architecture.SummaryHead, builder: HeadBuilder) -> None:
        super().__init__(part, builder)
        self.reader: PooledHead | SummaryClassifier = _READERS[type(part.reader)](part.reader, builder.build)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The classifier, with its pooler."""
        return {NAME: self.reader}

    def inputs(self, batch: Batch, num_filled: int) -> tuple[Batch, int]:
        """Return the padded batch, without a mask if the summaries never see the padding."""
        shown = batch if self.reader.sees_padding else replace(batch, mask=None)
        return shown.padded(num_filled, hides=True), num_filled

    def task_logits(self, hidden: Tensor, batch: Batch, num_choices: int) -> Tensor:
        """Return the logits of each text [B, C] or, if several texts share a label, those of each question [B /
        choices, choices].
        """
        logits = self.reader.logits(hidden, batch)
        return logits.view(-1, num_choices) if self.part.labels.is_shared else logits


class ChoosingHead(SummaryHead):
    """Head that chooses a class, or the right one of the texts of a question, which are successive sequences."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the cross entropies of the indexes of the classes, or of the right texts."""
        return cross_entropies(logits, labels)


class NumberHead(SummaryHead):
    """Head that predicts a number."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the squared differences to the numbers [B]. A number that is missing is NaN."""
        numbers = labels.to(logits.dtype)
        return torch.where(numbers.isnan(), 0.0, logits.squeeze(1) - numbers).square().sum()


class SummaryClassifier(nn.Module):
    """Classifier of the last token of each sequence that is not padding, in causal attention. Maps [B, H] to [B, C].
    Every rank computes all logits and sends nothing.
    """

    sees_padding = False
    """Whether the summaries would see padding without a mask: no token sees padding at the end of its sequence."""

    def __init__(self, part: architecture.SummaryClassifier, build: Builder) -> None:
        super().__init__()
        self.mesh, self.classifier = build.mesh, Classifier(part.matrix, build)

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Compute the logits [B, C] of the sequences from the last hidden states."""
        logits: Tensor = self(take_summaries(hidden, last_places(batch.mask, batch.tokens), self.mesh))
        return logits

    def forward(self, summaries: Tensor) -> Tensor:
        """Compute the logits from summaries that are the same on every rank."""
        return F.linear(summaries, local(self.classifier.weight, summaries.dtype))


def last_places(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Return, for each sequence, the index [B] of the last token that is not padding. `mask` [B, S] is false for
    padding; None means that there is no padding. If a sequence consists only of padding, the index is 0.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    shown = places.expand_as(tokens) if mask is None else places * mask
    return shown.amax(1)


_READERS: dict[type, Callable[[Any, Builder], PooledHead | SummaryClassifier]] = {
    PooledPart: PooledHead,
    architecture.SummaryClassifier: SummaryClassifier,
}
"""Module that reads the summaries, by the class that describes it."""
