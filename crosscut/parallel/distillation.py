"""Divergence of a student's distributions from a teacher's, for a vocabulary that is cut over the tensor ranks (Hinton
et al. 2015, arXiv 1503.02531).

Each rank holds the logits of both models for its own part of the vocabulary. The ranks send six numbers per token: the
largest logit of each model, the sum of exponentials of each model, and the two sums from which every divergence follows
(`kernels.divergences`). With the temperature T, the softmax of z becomes softmax(z / T), and the loss of a token is

    (1 - alpha) cross entropy + alpha T^2 D

The factor T^2 keeps the size of the gradient, which falls with 1 / T^2, so that alpha has the same effect at every
temperature.

Of a teacher that was computed before, only the logits of its k likeliest tokens are known, and the probability of the
rest. The divergence is then that of two distributions over k + 1 outcomes: the k tokens, and the rest of the vocabulary
as one outcome. By the data-processing inequality, it is a lower bound of the divergence over the whole vocabulary, for
every beta, and it is equal if k is the vocabulary. The loss spreads the teacher's rest over the columns in proportion
to the student's probabilities: all ratios t / s of the rest are then equal, and the formulas of a whole vocabulary give
the divergence of the k + 1 outcomes and its gradient. The messages are those of a teacher that is computed.

Shapes: C tokens of a chunk, V padded vocabulary, T tensor ranks, k tokens whose logits are known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.kernels.divergences import divergence, divergence_error_, partial_divergences
from crosscut.parallel.collectives import all_gather, all_reduce
from crosscut.parallel.mesh import Axis


class VocabularyPart(NamedTuple):
    """Part of the vocabulary that one rank of the tensor axis holds."""

    axis: Axis
    first: int
    """Token id of the part's first row."""
    num_real: int
    """Number of the part's rows that are not padding."""

    @classmethod
    def of(cls, axis: Axis, local_size: int, vocab_size: int) -> Self:
        """Return this rank's part, given the number of its rows, and the number of real rows of all ranks."""
        first = axis.rank * local_size
        return cls(axis, first, max(0, min(local_size, vocab_size - first)))


class Mixture(NamedTuple):
    """Mixture of the teacher's loss and of the data's loss."""

    alpha: float
    """Share of the teacher's loss, from 0 to 1. The data's loss has the rest."""
    beta: float
    """Place of the divergence between the forward KL (0) and the reverse KL (1)."""
    temperature: float = 1.0
    """Number T above 0 by which the logits of both models are divided in the teacher's loss, which is multiplied by
    T^2.
    """


class TopLogits(NamedTuple):
    """Logits of the likeliest tokens, the same on all tensor ranks."""

    ids: Tensor
    """Different ids of these tokens [C, k], as integers of any type."""
    logits: Tensor
    """Their logits, and the logit of the rest [C, k + 1], in the type of the loss: T times the logarithm of the sum of
    exp(z / T) over all other tokens.
    """

    @property
    def known(self) -> Tensor:
        """Whether the logits of a token are numbers [C]. That of the rest is -inf if there are no other tokens."""
        rest = self.logits[:, -1]
        return self.logits[:, :-1].isfinite().all(1) & (rest.isfinite() | rest.isneginf())


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation:
    """Teacher of one loss, and its share of it."""

    mixture: Mixture
    logits: Callable[[slice], Tensor | TopLogits]
    """Function that returns the teacher's logits of a chunk of the loss's tokens: [C, V/T] for this rank's rows of the
    student's vocabulary, or those of the likeliest tokens. They are float32 or wider, and the loss may change them in
    place.
    """
    sums: list[Tensor] = field(default_factory=list)
    """Two sums [2] over the tokens of each loss that was computed: of the data's losses, and of the teacher's losses
    before the factor alpha.
    """


def distil(log_p: Tensor, teacher: Tensor | TopLogits, part: VocabularyPart, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return T^2 D for each token [C], and its gradients with respect to the student's logits [C, V/T].

    `log_p` [C, V/T] are the student's log probabilities, and `teacher` are the teacher's logits [C, V/T], which are
    changed in place, or those of its likeliest tokens. Padding gets no gradient.

    Forward: an all-reduce (max) of 2 C elements, and two all-reduces (sum) of 2 C elements. Backward: nothing is sent.
    """
    heat, beta, real = mixture.temperature, mixture.beta, slice(part.num_real)
    log_s = log_p[:, real] / heat
    if isinstance(teacher, TopLogits):
        log_t = _beside(log_s, teacher, part, heat)
    else:
        log_t = teacher[:, real].div_(heat)
        log_z = _log_sums(log_s, log_t, axis=part.axis)
        log_s.sub_(log_z[0].unsqueeze(1))
        log_t.sub_(log_z[1].unsqueeze(1))
    sums = all_reduce(partial_divergences(log_s, log_t, beta), part.axis)
    error = divergence_error_(log_s, log_t, sums, beta).mul_(heat)
    if part.num_real < log_p.shape[1]:
        error = F.pad(error, (0, log_p.shape[1] - part.num_real))
    return heat * heat * divergence(sums, beta), error


def distil_labels(logits: Tensor, teacher: Tensor, counts: Tensor, axis: Axis, mixture: Mixture) -> Tensor:
    """Return T^2 D for each of N labels, or 0 where `counts` [N] is false, as a tensor with a gradient. `logits` [N, K]
    and `teacher` [N, K] are the student's and the teacher's logits, whole on each rank. `axis` has one rank, so nothing
    is sent.
    """
    known = logits.detach()
    losses, error = distil(known, teacher.clone(), VocabularyPart(axis, 0, logits.shape[1]), mixture)
    error.masked_fill_(~counts.unsqueeze(1), 0.0)
    return losses.masked_fill(~counts, 0.0) + (error * (logits - known)).sum(1)  # adds 0, which has the gradient


def top_logits(logits: Tensor, part: VocabularyPart, k: int, temperature: float) -> TopLogits:
    """Return the logits of the `k` likeliest tokens, given logits [C, V/T] for this rank's part of the vocabulary.

    Communication: two all-gathers of C k elements from each rank, and two all-reduces of C elements.
    """
    real = logits[:, : part.num_real]
    own, columns = real.topk(min(k, part.num_real))
    missing = (0, k - own.shape[1])
    found = all_gather(F.pad(own, missing, value=-math.inf), part.axis, 1)
    ids = all_gather(F.pad(columns + part.first, missing), part.axis, 1)
    top, places = found.topk(k)
    ids = ids.gather(1, places)
    rest = _without(real / temperature, _columns(ids, part))
    (log_rest,) = _log_sums(rest[:, :-1], axis=part.axis)
    return TopLogits(ids, torch.cat([top, log_rest.mul_(temperature).unsqueeze(1)], 1))


def _log_sums(*logits: Tensor, axis: Axis) -> Tensor:
    """Return the logarithm of the sum of exponentials over the columns of all ranks, for each of the tensors [C, V/T],
    as [tensors, C]. It is -inf without a column above -inf.

    Communication: an all-reduce (max) and an all-reduce (sum) of C elements for each tensor.
    """
    own = torch.stack([each.logsumexp(1) for each in logits])
    highest = all_reduce(own, axis, "max").clamp(min=torch.finfo(own.dtype).min)
    return highest + all_reduce((own - highest).exp_(), axis).log_()


def _beside(log_s: Tensor, top: TopLogits, part: VocabularyPart, heat: float) -> Tensor:
    """Normalise the student's logits `log_s` [C, V/T] at the temperature `heat`, in place, and return the teacher's log
    probabilities [C, V/T], in which the rest is spread like the student's probabilities.
    """
    columns = _columns(top.ids, part)
    log_t = _without(log_s, columns)
    log_z, log_rest = _log_sums(log_s, log_t[:, :-1], axis=part.axis)
    known = (top.logits / heat).log_softmax(1)
    log_s.sub_(log_z.unsqueeze(1))
    log_t.add_((known[:, -1] - log_rest).unsqueeze(1))
    return log_t.scatter_(1, columns, known[:, :-1])[:, :-1]


def _without(logits: Tensor, columns: Tensor) -> Tensor:
    """Return logits [C, V/T] with -inf in some columns [C, k], and with one column more, of no meaning."""
    return F.pad(logits, (0, 1)).scatter_(1, columns, -math.inf)


def _columns(ids: Tensor, part: VocabularyPart) -> Tensor:
    """Return the columns of token ids in this rank's part of the vocabulary, and the column behind it for others."""
    index = ids - part.first
    return index.masked_fill((index < 0) | (index >= part.num_real), part.num_real).long()
