"""The passes over a chunk's logits that the loss takes: each reads them once and writes what the next needs.

Uncompiled, PyTorch's log-softmax and what follows it go over float32 numbers, in place. Compiled there are three
passes, over logits in the products' own type: the maximum; the sum of exponentials and the target's logit; the error,
whose exponentials are computed again, since that costs less than to write and read them. Between the passes ranks meet,
so these are the largest pieces that a compiler can fuse.

Shapes: C tokens of a chunk, V vocabulary, T tensor ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Pass = Callable[..., Tensor]


class LossPasses:
    """Three functions of local tensors, as `compiled` makes them; nothing is sent here."""

    def __init__(self, compiled: Callable[[Pass], Pass]) -> None:
        self.highest, self.sums, self.error = compiled(_highest), compiled(_sums), compiled(_error)


def _highest(logits: Tensor, num_real: int, wide: torch.dtype) -> Tensor:
    """The largest of each token's real logits [C], from [C, V/T]."""
    return torch.where(_columns(logits) < num_real, logits.to(wide), -torch.inf).amax(1)


def _sums(logits: Tensor, highest: Tensor, index: Tensor, num_real: int) -> Tensor:
    """The sums of exponentials and the targets' logits, both relative to the highest [2, C]; 0 for a target that is
    not here. `index` [C] is each target's column.
    """
    columns = _columns(logits)
    relative = logits.to(highest.dtype) - highest.unsqueeze(1)
    exponentials = torch.where(columns < num_real, relative.exp(), 0.0).sum(1)
    target = torch.where((columns == index.unsqueeze(1)) & (columns < num_real), relative, 0.0).sum(1)
    return torch.stack([exponentials, target])


def _error(logits: Tensor, highest: Tensor, sums: Tensor, index: Tensor, num_real: int) -> Tensor:
    """The probabilities p less one at the target, in the type of the logits [C, V/T]; 0 for padding."""
    columns = _columns(logits)
    p = (logits.to(highest.dtype) - highest.unsqueeze(1)).exp() / sums.unsqueeze(1)
    error = p - (columns == index.unsqueeze(1)).to(p.dtype)
    return torch.where(columns < num_real, error, 0.0).to(logits.dtype)


def log_softmax_(logits: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Log-softmax of the first `num_real` columns of float32 or wider logits [C, V/T], in place.

    Gives it and the logarithm of the sum of exponentials by which it has divided [C]: -inf without real columns.
    """
    if num_real == 0:
        logits.zero_()  # whatever is finite: the sum below says that these columns take no probability
    elif num_real < logits.shape[1]:
        logits[:, num_real:] = -torch.inf
    # PyTorch's own log-softmax goes over a row while it is in the cache. Its sum's logarithm is what the first column
    # has lost. (Asked for a wider type, it would make a copy of its own.)
    first = logits[:, 0].clone()
    log_p = torch.log_softmax(logits, 1, out=logits)
    return log_p, first - log_p[:, 0] if num_real else torch.full_like(first, -torch.inf)


def error_into(out: Tensor, log_p: Tensor, index: Tensor, here: Tensor) -> Tensor:
    """Probabilities less one at the target [C, V/T], put into `out`, also of a narrower type, which may be `log_p`.

    `index` [C] is each target's column, `here` [C] whether it is the target and not a stand-in for one elsewhere.
    """
    at_target = log_p.gather(1, index.unsqueeze(1)).exp_() - here.unsqueeze(1).to(log_p.dtype)
    error = torch.exp(log_p, out=out)
    return error.scatter_(1, index.unsqueeze(1), at_target.to(error.dtype))


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
