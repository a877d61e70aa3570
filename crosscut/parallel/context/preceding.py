"""Tokens before each piece of a sequence that context ranks share. A causal convolution reads them.

    piece                       0         1         2         3
    rank                        0         1         1         0         two pieces for each rank (see `zigzag`)
    `preceded_pieces` gives   ..|-----| ..|-----| ..|-----| ..|-----|   each piece with the tokens before it

The exchange is that of the halos of images (`crosscut.parallel.exchange`). Mixers with a state do not need it: they
exchange heads for tokens before their convolution, because their recurrence needs whole sequences.

Shapes: B batch, S sequence, C context ranks.
"""

from functools import lru_cache

import torch.nn.functional as F
from torch import Tensor

from crosscut.parallel.context.zigzag import require_pieces
from crosscut.parallel.exchange import ExchangePlan, Range, fetched
from crosscut.parallel.mesh import Axis


def preceded_pieces(x: Tensor, axis: Axis, *, before: int) -> tuple[Tensor, ...]:
    """Return this rank's pieces of the sequence, each after the `before` tokens that precede it in the sequence: of [B,
    S/C, ...], two tensors [B, `before` + S/(2 C), ...], or one tensor on an axis of size 1. Zeros precede the sequence.

    A convolution with K taps needs K - 1 tokens before. Forward: one message to each rank that needs tokens of this
    rank. Backward: as many messages with the gradients of these tokens, which are added. Raises `LayoutError` if the
    number of tokens of a rank is odd.
    """
    if axis.size == 1:
        return (_filled(x, before),)
    plan = plan_preceding(x.shape[1] * axis.size, axis.size, before)
    windows = fetched(x, axis, 1, plan).split([read.size for read in plan.wants[axis.rank]], 1)
    size = before + x.shape[1] // 2
    return tuple(_filled(window, size - window.shape[1]) for window in windows)


@lru_cache(maxsize=256)
def plan_preceding(length: int, num_ranks: int, before: int) -> ExchangePlan:
    """Plan the messages of `preceded_pieces` for a sequence of `length` tokens."""
    require_pieces(length, num_ranks)
    size = length // (2 * num_ranks)
    pieces = [Range(i * size, (i + 1) * size) for i in range(2 * num_ranks)]
    held = tuple((pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks))
    wants = tuple(tuple(Range(max(piece.start - before, 0), piece.stop) for piece in each) for each in held)
    return ExchangePlan(held, wants)


def _filled(window: Tensor, missing: int) -> Tensor:
    """Return a window with zeros for the tokens that it misses before the sequence."""
    return F.pad(window, (*(0, 0) * (window.dim() - 2), missing, 0)) if missing else window
