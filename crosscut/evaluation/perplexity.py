"""Loss and perplexity of a model on batches of tokens.

The loss is the mean cross entropy per token, and the perplexity is the exponential of the loss.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from crosscut.model import GPT, Batch
from crosscut.parallel import reshard
from crosscut.parallel.collectives import all_reduce


@dataclass(frozen=True, kw_only=True)
class Score:
    """Loss of a model on a set of target tokens."""

    loss: float
    """Mean cross entropy per target token, in nats."""
    num_tokens: int
    """Number of target tokens that were scored."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss, or infinity if the exponential overflows."""
        return math.inf if self.loss > 700 else math.exp(self.loss)


@torch.no_grad()
def evaluate_loss(model: GPT, batches: Iterable[Batch]) -> Score:
    """Score a model without dropout. The result is the same on every rank.

    `batches` are the batches of this data rank. Every data rank must have the same number of batches, padded with
    ignored targets. Communication: the forward passes' collectives, and one all-reduce of two elements over
    `mesh.tokens`, the data axis.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=model.mesh.device)
    try:
        for batch in batches:
            sums[0] += model.loss(*batch.plain())
            sums[1] += batch.num_targets
    finally:
        reshard(model)
        model.train(was_training)
    loss, count = all_reduce(sums, model.mesh.tokens).tolist()
    return Score(loss=loss / max(count, 1), num_tokens=int(count))
