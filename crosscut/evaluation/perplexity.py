"""Loss, perplexity and bits per byte of a model on batches of tokens.

The loss is the mean cross entropy per token, and the perplexity is the exponential of the loss. Neither can compare
models with different vocabularies, because their tokens differ in length. Such models are compared by

    bits per byte = sum over all scored tokens of -log2 P(token) / UTF-8 bytes of the scored text

An end-of-text token is scored like any token, but has no bytes.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from crosscut.model import GPT, Batch
from crosscut.model.stages import forward_loss
from crosscut.parallel import reshard
from crosscut.parallel.collectives import all_reduce


@dataclass(frozen=True, kw_only=True)
class Score:
    """Loss of a model on a set of target tokens."""

    loss: float
    """Mean cross entropy per target token, in nats."""
    num_tokens: int
    """Number of target tokens that were scored."""
    num_bytes: int = 0
    """Number of UTF-8 bytes of the scored text. 0 if unknown, or if all scored tokens are end-of-text tokens."""
    of_labels: bool = False
    """Whether the targets are the labels of a task, not tokens. Labels have no perplexity."""

    @property
    def bits_per_byte(self) -> float | None:
        """Total loss in bits per byte of the text. None if `num_bytes` is 0."""
        return bits_per_byte(self.loss * self.num_tokens, self.num_bytes) if self.num_bytes else None

    @property
    def perplexity(self) -> float | None:
        """Exponential of the loss, or infinity if the exponential overflows. None for labels."""
        if self.of_labels:
            return None
        return math.inf if self.loss > 700 else math.exp(self.loss)


def bits_per_byte(loss: float, num_bytes: int) -> float:
    """Convert a total loss in nats to bits per byte of a text of `num_bytes` bytes."""
    return loss / math.log(2) / num_bytes


@contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """Context in which a model runs without dropout. At its end, all messages between stages have arrived."""
    was_training = model.training
    model.eval()
    try:
        yield
        if model.mesh.channels is not None:
            model.mesh.channels.finish()
    finally:
        reshard(model)
        model.train(was_training)


@torch.no_grad()
def evaluate_loss(model: GPT, batches: Iterable[Batch], *, num_bytes: int = 0) -> Score:
    """Score a model without dropout. The result is the same on every rank.

    `batches` are the batches of this data rank. Every data rank must have the same number of batches. If a rank has
    fewer, add batches that have only ignored targets. `num_bytes` is the size in UTF-8 bytes of the text that the
    targets on all ranks spell. Communication: the forward passes' collectives, and one all-reduce of two elements over
    `mesh.tokens`, the data and context axes. In a pipeline, also the hidden states between stages, and one all-reduce
    of one element over the stages.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=model.mesh.device)
    with evaluating(model):
        for batch in batches:
            sums[0] += forward_loss(model, batch)
            sums[1] += batch.num_targets
    sums = all_reduce(sums, model.mesh.tokens)
    for axis in model.mesh.owners:  # only the last stage has a loss, and all stages count the same targets
        sums[0] = all_reduce(sums[0], axis)
    loss, count = sums.tolist()
    of_labels = "labels" in model.reads
    return Score(loss=loss / max(count, 1), num_tokens=int(count), num_bytes=num_bytes, of_labels=of_labels)
