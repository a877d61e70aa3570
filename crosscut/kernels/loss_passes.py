"""Passes of the loss over a chunk's logits. Each pass reads the logits once and computes what the next one needs.

Without compilation, PyTorch's log-softmax and the operators after it work in place on float32 numbers. With compilation
there are three passes over logits in the products' own type: the maximum; the sum of exponentials and the target's
logit; and the error. The last pass computes the exponentials again, which costs less than storing and reading them.
Ranks communicate between the passes, so these are the largest pieces that a compiler can fuse.

Shapes: C tokens of a chunk, V vocabulary, T tensor ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Pass = Callable[..., Tensor]


class LossPasses:
    """The three passes as functions of local tensors, each made by `compiled`. They send nothing."""

    def __init__(self, compiled: Callable[[Pass], Pass]) -> None:
        self.highest, self.sums, self.error = compiled(_highest), compiled(_sums), compiled(_error)


def _highest(logits: Tensor, num_real: int, wide: torch.dtype) -> Tensor:
    """Largest real logit of each token [C], from logits [C, V/T]."""
    return torch.where(_columns(logits) < num_real, logits.to(wide), -torch.inf).amax(1)


def _sums(logits: Tensor, highest: Tensor, index: Tensor, num_real: int) -> Tensor:
    """Sums of exponentials and logits of the targets, both relative to `highest` [C], as [2, C]. `index` [C] is each
    target's column; the target's logit is 0 if another rank holds the target.
    """
    columns = _columns(logits)
    relative = logits.to(highest.dtype) - highest.unsqueeze(1)
    exponentials = torch.where(columns < num_real, relative.exp(), 0.0).sum(1)
    target = torch.where((columns == index.unsqueeze(1)) & (columns < num_real), relative, 0.0).sum(1)
    return torch.stack([exponentials, target])


def _error(logits: Tensor, highest: Tensor, sums: Tensor, index: Tensor, num_real: int) -> Tensor:
    """Probabilities minus one at the target [C, V/T], in the type of the logits; 0 for padding."""
    columns = _columns(logits)
    p = (logits.to(highest.dtype) - highest.unsqueeze(1)).exp() / sums.unsqueeze(1)
    error = p - (columns == index.unsqueeze(1)).to(p.dtype)
    return torch.where(columns < num_real, error, 0.0).to(logits.dtype)


def log_softmax_(logits: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Compute log-softmax over the first `num_real` columns of logits [C, V/T] in place. The logits are float32 or
    wider.

    Also returns the logarithm of the sum of exponentials [C]; -inf if there are no real columns.
    """
    if num_real == 0:
        logits.zero_()  # any finite value: the sum of -inf below gives these columns no probability
    elif num_real < logits.shape[1]:
        logits[:, num_real:] = -torch.inf
    # PyTorch's log-softmax processes a row while it is in the cache. The logarithm of its sum is the amount by which
    # the first column decreases. (With a wider result type, it would allocate a copy.)
    first = logits[:, 0].clone()
    log_p = torch.log_softmax(logits, 1, out=logits)
    return log_p, first - log_p[:, 0] if num_real else torch.full_like(first, -torch.inf)


def error_into(out: Tensor, log_p: Tensor, index: Tensor, here: Tensor) -> Tensor:
    """Write probabilities minus one at the target [C, V/T] into `out`, which may be `log_p` or have a narrower type.

    `index` [C] is each target's column. `here` [C] is false if another rank holds the target; the column is then
    arbitrary.
    """
    at_target = log_p.gather(1, index.unsqueeze(1)).exp_() - here.unsqueeze(1).to(log_p.dtype)
    error = torch.exp(log_p, out=out)
    return error.scatter_(1, index.unsqueeze(1), at_target.to(error.dtype))


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
