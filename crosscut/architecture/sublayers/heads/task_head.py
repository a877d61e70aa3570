"""Heads for tasks about whole texts, in place of the output projection (Devlin et al. 2018, arXiv 1810.04805, section
4): the form of their labels, and their loss.
"""

from abc import abstractmethod
from dataclasses import dataclass

from crosscut.architecture.inputs import LossTerm, Read
from crosscut.architecture.parameters import Parameter
from crosscut.architecture.steps import Passes, Step, Value
from crosscut.architecture.sublayers.heads.head import Head, LossStep
from crosscut.architecture.target import Target

NAME = "task"
"""Name of the modules of a task's head, and of the term of its loss."""


@dataclass(frozen=True, kw_only=True)
class TaskHead(Head):
    """Head of a model that solves a task."""

    labels: Read
    """Form of the labels."""

    @property
    def reads(self) -> dict[str, Read]:
        """Fields of a batch that the head and the loss read, by name. The texts of a task have different lengths, so
        every batch has padding.
        """
        return {"mask": Read("mask"), "labels": self.labels}

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The losses of the labels."""
        return (LossTerm(NAME, "labels"),)

    @property
    def vocabulary(self) -> Parameter | None:
        """None: the head computes no logits of the vocabulary."""
        return None

    @property
    def uses_embedding(self) -> bool:
        """False."""
        return False

    @abstractmethod
    def logits(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the logits, and the steps that compute them from the normalised hidden states `x`."""

    def after_norm(self, x: Value) -> list[Step]:
        """Compute the logits and the loss."""
        logits, steps = self.logits(x)
        return [*steps, TaskLoss(reads=(logits,), gives=(Value("loss", 1),), hidden=x.width)]


@dataclass(frozen=True, kw_only=True)
class TaskLoss(LossStep):
    """Compute the loss of a task: the cross entropy or, for numbers, the squared difference. Every rank computes the
    whole loss and sends nothing.
    """

    hidden: int
    """Width of the residual stream."""

    def ends_passes(self, target: Target) -> Passes:
        """Bytes that the embedding, the final norm and the head of the task read and write in one micro-batch.

        The bytes are counted as in a language model, without the logits: the forward pass reads or writes the whole
        residual stream six times, and the backward pass five times.
        """
        stream = target.tokens * self.hidden * target.compute_bytes
        return Passes(forward=6 * stream, backward=5 * stream)
