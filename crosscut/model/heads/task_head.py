"""Heads that solve a task for a whole text: what they have in common.

Shapes: B sequences, S tokens of a sequence, H hidden, C logits.
"""

from abc import abstractmethod
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture import Matrix
from crosscut.architecture.sublayers.heads.task_head import NAME
from crosscut.architecture.sublayers.heads.task_head import TaskHead as Part
from crosscut.config import IGNORED, ConfigError
from crosscut.config.checks import divisors, listed
from crosscut.model.batch import Batch
from crosscut.model.building import Builder
from crosscut.model.heads.head import Head, Teaching, Weights
from crosscut.parallel import replicated_parameter
from crosscut.parallel.distillation import distil_labels

_Part = TypeVar("_Part", bound=Part)


class TaskHead(Head[_Part], Generic[_Part]):
    """Head of a model that solves a task."""

    @abstractmethod
    def task_logits(self, hidden: Tensor, batch: Batch, num_choices: int) -> Tensor:
        """Return the logits of the task (`Head.task_logits`)."""

    @abstractmethod
    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of `labels`, given logits in float32 or wider. Labels that are missing add
        nothing.
        """

    def loss(self, hidden: Tensor, batch: Batch, how: Weights, tied: Tensor | None = None) -> Tensor:
        """Return the sum of the losses of the labels, times its factor."""
        del tied
        assert batch.labels is not None
        logits = self.task_logits(hidden, batch, len(batch.tokens) // len(batch.labels))
        logits = logits.float() if logits.element_size() < 4 else logits
        loss = self.loss_of(logits, batch.labels)
        if how.teaching is not None:
            loss = self._mixed(loss, logits, batch, how.teaching)
        return (how.scales.get(NAME, 1.0) * loss).to(loss.dtype)

    def _mixed(self, loss: Tensor, logits: Tensor, batch: Batch, teaching: Teaching) -> Tensor:
        """Return the mixture of the sum of the labels' losses and of the teacher's losses. Each label has a
        distribution over dimension 1 of the logits, and the losses of a sequence's labels have equal shares.
        """
        assert batch.labels is not None
        assert batch.teacher_labels is not None, "the batch has no results of the teacher"
        teacher = batch.teacher_labels.to(logits.dtype).view(logits.shape)
        ours, theirs = (each.movedim(1, -1).flatten(0, -2) for each in (logits, teacher))
        counts, alpha = batch.labels.flatten() != IGNORED, teaching.mixture.alpha
        each = distil_labels(ours, theirs, counts, self.mesh.tensor.alone("labels"), teaching.mixture)
        learned = each.sum() / self.part.labels.width
        teaching.sums.append(torch.stack([loss, learned]).detach())
        return (1 - alpha) * loss + alpha * learned

    def require_task(self, num_sequences: int, num_choices: int) -> None:
        """Raise `ConfigError` if `num_choices` does not divide the number of sequences."""
        if num_sequences % num_choices:
            raise ConfigError(
                f"`num_choices` must divide the number of sequences ({num_sequences}), but is {num_choices}. "
                f"Try {listed(divisors(num_sequences))}."
            )


class Classifier(nn.Module):
    """Weight [C, H] and bias [C] of a classifier, whole on every rank."""

    def __init__(self, matrix: Matrix, build: Builder) -> None:
        super().__init__()
        axis, dtype, device = build.mesh.tensor, build.dtype, build.mesh.parameter_device
        self.weight = replicated_parameter(matrix.weight.shape, axis, dtype=dtype, device=device)
        self.bias = None
        if matrix.bias is not None:
            self.bias = replicated_parameter(matrix.bias.shape, axis, dtype=dtype, device=device)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies of `labels`. Labels of `IGNORED` add nothing."""
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
