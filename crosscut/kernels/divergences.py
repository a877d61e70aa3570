"""Divergences between the distributions of a student and of a teacher, on the columns of the vocabulary that one device
holds.

One formula gives all of them. With s = softmax of the student, t = softmax of the teacher, and their mixture m:

    m = beta t + (1 - beta) s        D = KL(t || m) / (1 - beta) + KL(s || m) / beta

D is the generalised Jensen-Shannon divergence (Agarwal et al. 2024, arXiv 2306.13649, equation 1), divided by beta (1 -
beta). This division makes its ends limits: D is the forward KL(t || s) at beta = 0, where the second term vanishes, and
the reverse KL(s || t) at beta = 1, where the first term vanishes. Without the division, the divergence goes to 0 at
both ends. If s and t are close, D does not depend on beta to second order.

The gradient with respect to the student's logits is

    d D / d logits = s (log(s / m) - KL(s || m)) / beta        at beta = 0: s - t

A sum over columns is a sum over ranks if the vocabulary is cut: no rank needs the columns of another one.

Shapes: C tokens, K columns of the device.
"""

import math

import torch
from torch import Tensor

_FAR = 20.0
"""Logarithm of a ratio of probabilities above which `_log_mixture` factors out the teacher's probability."""


def partial_divergences(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return the columns' parts of KL(t || m) and KL(s || m), as [2, C]; 0 for a divergence that D leaves out. `log_s`
    and `log_t` [C, K] are the logarithms of probabilities above 0, which are normalised over the columns of all
    devices.
    """
    ratio = log_t - log_s
    nothing = ratio.new_zeros(len(ratio))
    of_student = nothing if beta == 0.0 else _log_mixture(ratio, beta).mul_(log_s.exp()).sum(1).neg_()
    ratio = torch.sub(log_s, log_t, out=ratio)
    of_teacher = nothing if beta == 1.0 else _log_mixture(ratio, 1.0 - beta).mul_(log_t.exp()).sum(1).neg_()
    return torch.stack([of_teacher, of_student])


def divergence(sums: Tensor, beta: float) -> Tensor:
    """Return the divergences D [C] of tokens, given KL(t || m) and KL(s || m) [2, C] over all columns."""
    of_teacher, of_student = sums.unbind()
    if beta in (0.0, 1.0):
        return of_student if beta else of_teacher
    return of_teacher / (1.0 - beta) + of_student / beta


def divergence_error_(log_s: Tensor, log_t: Tensor, sums: Tensor, beta: float) -> Tensor:
    """Replace `log_s` [C, K] by the gradients of the divergences with respect to the student's logits, and return it.
    `sums` [2, C] are KL(t || m) and KL(s || m) over all columns.
    """
    if beta == 0.0:
        return log_s.exp_().sub_(log_t.exp())
    mixed = _log_mixture(log_t - log_s, beta).add_(sums[1].unsqueeze(1))
    return log_s.exp_().mul_(mixed).div_(-beta)


def _log_mixture(ratio: Tensor, weight: float) -> Tensor:
    """Return log(weight e^ratio + 1 - weight), which is log(m / s) for the ratio log(t / s) and the weight of t. It is
    exact for a small weight, and does not overflow for a large ratio. With a weight of 1, `ratio` itself is returned.
    """
    if weight == 1.0:
        return ratio
    near = ratio.clamp(max=_FAR).expm1_().mul_(weight).log1p_()
    far = ratio.clamp(min=_FAR).neg_().exp_().mul_((1.0 - weight) / weight).log1p_().add_(ratio).add_(math.log(weight))
    return torch.where(ratio > _FAR, far, near, out=near)
