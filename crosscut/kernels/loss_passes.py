"""Passes over the logits of a chunk of tokens, which compute the loss and its gradients. Each pass reads the logits
once.

Without compilation, PyTorch's log-softmax and the operators after it work in place on float32 logits. With compilation,
two passes read the logits in the element type of the products:

1. `sums` computes each token's largest logit, sum of exponentials and target's logit. A GPU computes the first two
   together: whenever it finds a larger logit, it multiplies the sum so far by the exponential of the difference
   (Milakov and Gimelshein 2018, arXiv 1805.02867).
2. `error` replaces the logits by their gradients. It computes the exponentials again, which takes less time than
   storing and reading them.

The ranks communicate between the passes, so a compiler cannot fuse the two into one kernel. The first pass therefore
refers to the largest logit of its own rank. If the model caps its logits, each compiled pass caps the logits again.

Shapes: C tokens of a chunk, V vocabulary, T tensor ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.kernels.soft_cap import soft_cap

Pass = Callable[..., Tensor]


class Logits(NamedTuple):
    """Logits of one chunk of tokens on one rank."""

    values: Tensor
    """Logits [C, V/T] before the soft cap, in the element type of the products."""
    num_real: int
    """Number of columns (tokens of the vocabulary) that are not padding."""
    cap: float
    """Soft cap on the absolute value of the logits (`soft_cap`). 0 means no cap."""


class LossPasses:
    """Compiled functions for the two passes of the loss over a rank's logits: `sums` and `error`. The passes send
    nothing between ranks.

    The argument `compiled` is a function that compiles a pass, such as `torch.compile`.
    """

    def __init__(self, compiled: Callable[[Pass], Pass]) -> None:
        self.sums, self.error = compiled(_sums), compiled(_error)


def _sums(logits: Logits, index: Tensor, wide: torch.dtype) -> Tensor:
    """Return, for each token, the largest logit, the sum of exponentials relative to it, and the target's logit, as
    [3, C], of the rank's own columns without padding. A rank that has only padding returns -inf and zeros.

    `index` [C] is the column of each target. If another rank holds a target, the target's logit is 0.
    """
    values, num_real, cap = logits
    if not num_real:
        nothing = torch.zeros(len(values), dtype=wide, device=values.device)
        return torch.stack([nothing - torch.inf, nothing, nothing])
    columns = _columns(values)
    real = torch.where(columns < num_real, soft_cap(values.to(wide), cap), -torch.inf)
    highest = real.amax(1, keepdim=True)  # this line and the next have the form that Inductor turns into one pass
    lowest = torch.finfo(wide).min  # all logits of a rank may be -inf
    exponentials = (real - highest.clamp(min=lowest)).exp().sum(1, keepdim=True)
    target = torch.where((columns == index.unsqueeze(1)) & (columns < num_real), real, 0.0).sum(1)
    return torch.stack([highest.squeeze(1), exponentials.squeeze(1), target])


def _error(logits: Logits, highest: Tensor, sums: Tensor, index: Tensor, growth: Tensor | None) -> Tensor:
    """Replace the logits [C, V/T] by the gradients of the loss with respect to them, in place, and return the
    gradients. The gradients are the probabilities, minus 1 at the target, and 0 for padding. With a soft cap, the
    gradients are multiplied by the cap's derivative.

    `highest` [C] is each token's largest logit on all ranks, and `sums` [C] the sum of exponentials relative to it.
    `growth` [C] multiplies the probabilities; None means 1.
    """
    values, num_real, cap = logits
    columns = _columns(values)
    p = (soft_cap(values.to(highest.dtype), cap) - highest.unsqueeze(1)).exp() / sums.unsqueeze(1)
    if growth is not None:
        p = p * growth.unsqueeze(1)
    error = p - (columns == index.unsqueeze(1)).to(p.dtype)
    if cap:  # the compiler computes the capped logits once
        error = error * (1.0 - (soft_cap(values.to(highest.dtype), cap) / cap).square())
    return values.copy_(torch.where(columns < num_real, error, 0.0))


def log_softmax_(logits: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Replace `logits` [C, V/T], in place, by their log-softmax over the first `num_real` columns. The logits must be
    float32 or wider.

    Returns the log-softmax and the logarithm of each token's sum of exponentials [C]. If `num_real` is 0, this
    logarithm is -inf.
    """
    if num_real == 0:
        logits.zero_()  # any finite value works, because the returned logarithm of -inf stands for a probability of 0
    elif num_real < logits.shape[1]:
        logits[:, num_real:] = -torch.inf
    # PyTorch's log-softmax processes a row while the row is in the cache. It subtracts the logarithm of the sum of
    # exponentials, which therefore follows from the first column. (With a wider result type, it would make a copy.)
    first = logits[:, 0].clone()
    log_p = torch.log_softmax(logits, 1, out=logits)
    return log_p, first - log_p[:, 0] if num_real else torch.full_like(first, -torch.inf)


def error_into(
    out: Tensor,
    log_p: Tensor,
    index: Tensor,
    here: Tensor,
    *,
    growth: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Write the gradients of the logits into `out` [C, V/T] and return `out`. The gradients are each token's
    probabilities, minus `here` at the target.

    `log_p` [C, V/T] are the log probabilities. `out` may be `log_p` itself, or have a narrower element type. `index`
    [C] is each target's column. `here` [C] is the target's share of the loss, or whether it has one; 0 for a target
    that another rank holds, whose `index` is then any valid column. `growth` [C] multiplies the probabilities, and
    `slopes` [C, V/T], the derivatives of the soft cap, multiply the gradients. For both, None means 1.
    """
    at_target = log_p.gather(1, index.unsqueeze(1)).exp_()
    if growth is not None:
        at_target.mul_(growth.unsqueeze(1))
    at_target = at_target - here.unsqueeze(1).to(log_p.dtype)
    error = torch.exp(log_p, out=out)
    if growth is not None:
        error.mul_(growth.unsqueeze(1))
    error.scatter_(1, index.unsqueeze(1), at_target.to(error.dtype))
    return error if slopes is None else error.mul_(slopes)


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
