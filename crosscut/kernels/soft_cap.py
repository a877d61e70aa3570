"""Soft cap of the logits, which keeps every logit between -cap and cap (Gemma 2, arXiv 2408.00118, section 2).

y = cap tanh(x / cap)        d y / d x = 1 - (y / cap)^2
"""

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return the capped logits, with the shape and element type of `logits`. If `cap` is 0, return `logits`
    unchanged.
    """
    return torch.tanh(logits / cap) * cap if cap else logits


def soft_cap_(logits: Tensor, cap: float, slopes: Tensor | None = None) -> Tensor:
    """Cap `logits` in place and return `logits`. `cap` must be above 0. If `slopes` is given, write the derivative of
    each capped logit into `slopes`, which must have the shape of `logits`.
    """
    logits.div_(cap).tanh_()
    if slopes is not None:
        torch.mul(logits, logits, out=slopes).neg_().add_(1.0)
    return logits.mul_(cap)
