"""Passes over the logits of a chunk of tokens, which compute the loss and its gradients. Each pass reads the logits
once.

Without compilation, PyTorch's log-softmax and the operators after it work in place on float32 logits. With compilation,
three passes read the logits in the element type of the products:

1. `highest` computes each token's largest logit.
2. `sums` computes each token's sum of exponentials and the target's logit.
3. `error` computes the gradients of the logits. It computes the exponentials again, which takes less time than storing
   and reading them.

The ranks communicate between the passes, so a compiler cannot fuse two passes into one kernel. If the model caps its
logits, each compiled pass caps the logits again.

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
    """Compiled functions for the three passes of the loss over a rank's logits: `highest`, `sums` and `error`. The
    passes send nothing between ranks.

    The argument `compiled` is a function that compiles a pass, such as `torch.compile`.
    """

    def __init__(self, compiled: Callable[[Pass], Pass]) -> None:
        self.highest, self.sums, self.error = compiled(_highest), compiled(_sums), compiled(_error)


def _highest(logits: Logits, wide: torch.dtype) -> Tensor:
    """Return the largest logit of each token [C], without the padded part of the vocabulary."""
    values, num_real, cap = logits
    return torch.where(_columns(values) < num_real, soft_cap(values.to(wide), cap), -torch.inf).amax(1)


def _sums(logits: Logits, highest: Tensor, index: Tensor) -> Tensor:
    """Return, for each token, the sum of exponentials and the target's logit, as [2, C]. Both are relative to the
    largest logit `highest` [C].

    `index` [C] is the column of each target. If another rank holds a target, the target's logit is 0.
    """
    values, num_real, cap = logits
    columns = _columns(values)
    relative = soft_cap(values.to(highest.dtype), cap) - highest.unsqueeze(1)
    exponentials = torch.where(columns < num_real, relative.exp(), 0.0).sum(1)
    target = torch.where((columns == index.unsqueeze(1)) & (columns < num_real), relative, 0.0).sum(1)
    return torch.stack([exponentials, target])


def _error(logits: Logits, highest: Tensor, sums: Tensor, index: Tensor, growth: Tensor | None) -> Tensor:
    """Return the gradients of the loss with respect to the logits, [C, V/T], in the type of the logits. The gradients
    are the probabilities, minus 1 at the target, and 0 for padding. With a soft cap, the gradients are multiplied by
    the cap's derivative.

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
    return torch.where(columns < num_real, error, 0.0).to(values.dtype)


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
