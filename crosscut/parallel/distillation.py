"""Divergence of a student's distributions from a teacher's, for a vocabulary that is cut over the tensor ranks (Hinton
et al. 2015, arXiv 1503.02531).

Each rank holds the logits of both models for its own part of the vocabulary. The ranks send six numbers per token: the
largest logit of each model, the sum of exponentials of each model, and the two sums from which every divergence follows
(`kernels.divergences`). With the temperature T, the softmax of z becomes softmax(z / T), and the loss of a token is

    (1 - alpha) cross entropy + alpha T^2 D

The factor T^2 keeps the size of the gradient, which falls with 1 / T^2, so that alpha has the same effect at every
temperature.

Shapes: C tokens of a chunk, V padded vocabulary, T tensor ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.kernels.divergences import divergence, divergence_error_, partial_divergences
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.mesh import Axis


class VocabularyPart(NamedTuple):
    """Part of the vocabulary that one rank of the tensor axis holds."""

    axis: Axis
    first: int
    """Token id of the part's first row."""
    num_real: int
    """Number of the part's rows that are not padding."""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation:
    """Teacher of one loss, and its share of it."""

    mixture: Mixture
    logits: Callable[[slice], Tensor]
    """Function that returns the teacher's logits [C, V/T] of a chunk of the loss's tokens, for this rank's rows of the
    student's vocabulary. They are float32 or wider, and the loss may change them in place.
    """
    sums: list[Tensor] = field(default_factory=list)
    """Two sums [2] over the tokens of each loss that was computed: of the data's losses, and of the teacher's losses
    before the factor alpha.
    """


def distil(log_p: Tensor, teacher: Tensor, part: VocabularyPart, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return T^2 D for each token [C], and its gradients with respect to the student's logits [C, V/T].

    `log_p` [C, V/T] are the student's log probabilities, and `teacher` [C, V/T] the teacher's logits, which are changed
    in place. Padding gets no gradient.

    Forward: an all-reduce (max) of 2 C elements, and two all-reduces (sum) of 2 C elements. Backward: nothing is sent.
    """
    heat, beta, real = mixture.temperature, mixture.beta, slice(part.num_real)
    log_s, log_t = log_p[:, real] / heat, teacher[:, real].div_(heat)
    own = torch.stack([log_s.logsumexp(1), log_t.logsumexp(1)])
    highest = all_reduce(own, part.axis, "max")
    log_z = highest + all_reduce((own - highest).exp_(), part.axis).log_()
    log_s.sub_(log_z[0].unsqueeze(1))
    log_t.sub_(log_z[1].unsqueeze(1))
    sums = all_reduce(partial_divergences(log_s, log_t, beta), part.axis)
    error = divergence_error_(log_s, log_t, sums, beta).mul_(heat)
    if part.num_real < log_p.shape[1]:
        error = F.pad(error, (0, log_p.shape[1] - part.num_real))
    return heat * heat * divergence(sums, beta), error
