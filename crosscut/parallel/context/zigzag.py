"""Zigzag: the way in which the context ranks divide a sequence.

The sequence is cut into 2 C equal pieces, where C is the number of ranks. Rank r has the pieces r and 2 C - 1 - r:

    piece   0  1  2  3  4  5  6  7
    rank    0  1  2  3  3  2  1  0

In causal attention, later tokens see more keys. With one early and one late piece, every rank has the same number of
pairs of a query and a visible key. Source: Dubey et al. 2024, arXiv 2407.21783, section 3.3.2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crosscut.config import LayoutError


def split_zigzag(x: Tensor, num_ranks: int, dim: int) -> list[Tensor]:
    """Split the sequence in dimension `dim` of `x` into the parts of all ranks, and return the parts in the order of
    the ranks.

    Raises `LayoutError` unless the length of the sequence is a multiple of 2 x `num_ranks`.
    """
    if num_ranks == 1:
        return [x]
    require_pieces(x.shape[dim], num_ranks)
    pieces = x.chunk(2 * num_ranks, dim)
    return [torch.cat((pieces[rank], pieces[-1 - rank]), dim) for rank in range(num_ranks)]


def join_zigzag(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join the parts of all ranks into the whole sequence. This function undoes `split_zigzag`."""
    if len(parts) == 1:
        return parts[0]
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*early, *late[::-1]), dim)


def require_pieces(length: int, num_ranks: int) -> None:
    """Raise `LayoutError` unless a sequence of `length` tokens can be cut into two equal pieces for each rank."""
    if length % (2 * num_ranks):
        raise LayoutError(
            f"With {num_ranks} context ranks, the length of a sequence must be a multiple of {2 * num_ranks} (two "
            f"equal pieces for each rank), but is {length}. Change the length of the sequence."
        )
