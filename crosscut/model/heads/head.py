"""Head of a model: computes the loss and the logits from the last hidden states.

Shapes: B batch, S sequence, H hidden, N tokens, C tokens of a chunk, V vocabulary, T tensor ranks. Under sequence
parallelism, the last hidden states are [B, S/T, H].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from crosscut.architecture.inputs import Element
from crosscut.architecture.sublayers.heads.head import Head as Description
from crosscut.config import ConfigError, ModelConfig
from crosscut.kernels.products import Products
from crosscut.kernels.soft_cap import soft_cap_
from crosscut.model.batch import Batch
from crosscut.model.building import Builder
from crosscut.model.running import LossRunner
from crosscut.parallel import Distillation, LossSettings, Mixture, TopLogits, VocabParallelEmbedding

Scales = Mapping[str, float | Tensor]
"""Factor of each term of the loss, by the term's name (`GPT.loss_terms`). A term that is missing has the factor 1."""

SUMS: Scales = MappingProxyType({})
"""Factors that leave every term of the loss a sum."""

_Part = TypeVar("_Part", bound=Description)


class HeadBuilder(NamedTuple):
    """Builder of a head, with the objects that the head needs besides its description."""

    config: ModelConfig
    build: Builder
    tokens: VocabParallelEmbedding | None
    """Token embedding of the rank."""
    runner: LossRunner
    """Runner of the loss."""


class LogitOperands(NamedTuple):
    """Operands of the product that computes the logits of N tokens on one rank."""

    hidden: Tensor
    """Hidden states to which the output projection is applied: [N, H]."""
    weight: Tensor
    """This rank's rows of the output projection's weight: [V/T, H]."""
    settings: LossSettings
    """Bias and soft cap of the logits."""
    products: Products
    """Function that computes the product."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Teaching:
    """Share of a teacher in the loss on one rank, and its head, which is cut like the head of the model that learns."""

    mixture: Mixture
    dtype: torch.dtype
    """Element type of the teacher's logits in the loss: float32 or wider."""
    head: "Head[Any] | None" = None
    """Head of a teacher that predicts tokens; None if its logits are stored ones, or those of a task."""
    sums: list[Tensor] = field(default_factory=list)
    """Sums of the data's losses and of the teacher's losses [2], for each loss since the last step."""

    def of(self, batch: Batch) -> Distillation:
        """Return the teacher's part in the loss of the N tokens whose logits are computed, given the batch with the
        teacher's results for all tokens.
        """
        assert batch.teacher is not None, "the batch has no results of the teacher"
        rows = _predicted(batch.teacher, batch)
        logits: Callable[[slice], Tensor | TopLogits]
        if batch.teacher_ids is not None:
            logits = partial(_stored, _predicted(batch.teacher_ids, batch), rows, self.dtype)
        else:
            assert self.head is not None, "the batch has no stored logits"
            with torch.no_grad():
                logits = partial(_logits, self.head.operands(rows), self.dtype)
        return Distillation(mixture=self.mixture, logits=logits, sums=self.sums)


def _predicted(field: Tensor, batch: Batch) -> Tensor:
    """Return the rows of a field for the tokens whose logits are computed, [N, its width]."""
    rows = field.flatten(0, 1)
    return rows if batch.predicted is None else rows[batch.predicted]


def _stored(ids: Tensor, logits: Tensor, dtype: torch.dtype, piece: slice) -> TopLogits:
    """Return the stored logits of some of the tokens."""
    return TopLogits(ids[piece], logits[piece].to(dtype))


@torch.no_grad()
def _logits(operands: LogitOperands, dtype: torch.dtype, piece: slice) -> Tensor:
    """Return the logits [C, V/T] of some of the tokens, as a new tensor."""
    rows, weight, settings, products = operands
    logits = products.output(rows[piece], weight)
    if settings.bias is not None:
        logits = logits + settings.bias
    logits = logits.to(dtype)
    return soft_cap_(logits, settings.soft_cap) if settings.soft_cap else logits


class Weights(NamedTuple):
    """Factors of the terms of the loss, and its teacher."""

    scales: Scales
    z_loss: float
    """Coefficient of the z-loss (`parallel.cross_entropy`)."""
    teaching: Teaching | None = None
    """Teacher; None if the loss is that of the data alone."""

    def taught(self, batch: Batch) -> Distillation | None:
        """Return the teacher's part in the loss of the tokens whose logits are computed. None without a teacher."""
        return None if self.teaching is None else self.teaching.of(batch)


class Head(ABC, Generic[_Part]):
    """Head of a model on the rank that runs the last stage.

    The modules of a head belong to the model, under the names of `modules`, because parameter names have no prefix for
    the head.
    """

    def __init__(self, part: _Part, builder: HeadBuilder) -> None:
        self.part, self.mesh = part, builder.build.mesh

    @property
    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """Modules by their names in the model."""

    @abstractmethod
    def inputs(self, batch: Batch, num_filled: int) -> tuple[Batch, int]:
        """Return the batch that the layers read to compute the loss, and the number of padding tokens at the end of
        each of its sequences. `num_filled` is the number with which the ranks can split the sequences.
        """

    @abstractmethod
    def loss(self, hidden: Tensor, batch: Batch, how: Weights, tied: Tensor | None = None) -> Tensor:
        """Return the sum of all terms of the loss, each times its factor: a scalar. `hidden` are the last hidden states
        of `inputs(batch)`, and `tied` is the token embedding's weight of the same forward pass, if the head uses this
        weight and gradients are computed.
        """

    def operands(self, hidden: Tensor) -> LogitOperands:
        """Return the operands of the product that computes the logits of the vocabulary from N last hidden states [N,
        H], which are the same on all tensor ranks. Raises `ConfigError` for a head that predicts no tokens.
        """
        del hidden
        raise ConfigError(
            f'`model.head` must be "next_token" or "masked_tokens" for the scores of tokens, but is '
            f'"{self.part.name}". Call `task_logits` for the scores of a task.'
        )

    def require_task(self, num_sequences: int, num_choices: int) -> None:
        """Raise `ConfigError` if the head solves no task, or if `num_choices` does not divide `num_sequences`."""
        del num_sequences, num_choices
        raise ConfigError(
            f'`model.head` must be "classes", "number", "spans" or "choice" for the logits of a task, but is '
            f'"{self.part.name}". Choose a model that was fine-tuned for a task.'
        )

    def task_logits(self, hidden: Tensor, batch: Batch, num_choices: int) -> Tensor:
        """Return the logits of a task from the last hidden states of `inputs(batch)`, the same on all tensor ranks.
        Call `require_task` first.
        """
        raise NotImplementedError

    def weights(self, scales: Scales, z_loss: float, teaching: Teaching | None = None) -> Weights:
        """Return the factors of the loss, and its teacher. Raises `ConfigError` for factors of terms that the loss does
        not have, which would change nothing.
        """
        names = [term.name for term in self.part.loss_terms]
        if unknown := [name for name in scales if name not in names]:
            raise ConfigError(
                f"`scales` must have only terms of the model's loss ({', '.join(names)}), but has `{unknown[0]}`. "
                "Remove it."
            )
        return Weights(scales, z_loss, teaching)

    def require(self, batch: Batch) -> None:
        """Raise `ConfigError` for labels that the head cannot use, or if labels are missing."""
        wanted, labels = self.part.reads.get("labels"), batch.labels
        of_model = f'A batch for a model with `model.head` = "{self.part.name}"'
        if (labels is None) != (wanted is None):
            must, is_, what = ("must", "none", "with") if labels is None else ("must not", "some", "without")
            raise ConfigError(f"{of_model} {must} have labels, but has {is_}. Make the batch {what} labels.")
        is_number = wanted is not None and wanted.kind is Element.REAL
        if labels is not None and labels.is_floating_point() != is_number:
            must = "floating-point numbers" if is_number else "integers"
            raise ConfigError(f"{of_model} must have {must} as labels, but has {labels.dtype}. Convert the labels.")
