"""Parts of parameters that ranks hold and use, as spans of one dimension. Plain arithmetic.

A layer that is cut by columns may have several parts side by side, such as queries, keys and values. Every rank holds a
span of each part:

        parts of the whole layer    | q q q q | k k | v v |
        spans of rank 0 of 2        | q q     | k   | v   |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from crosscut.config import LayoutError

Span = tuple[int, int]
"""First index, and the index after the last one."""


@dataclass(frozen=True)
class Share:
    """Distribution of a parameter or buffer over the tensor ranks."""

    dim: int = 0
    """Dimension of which ranks use spans."""
    spans: tuple[tuple[Span, ...], ...] = ()
    """Spans that each rank uses, by rank. Empty: every rank uses the whole tensor."""
    is_whole: bool = True
    """Whether every rank holds the whole tensor, even if it uses only spans."""
    is_summed: bool = False
    """Whether each rank has only its term of the gradient, so that gradients are summed over the ranks."""

    @classmethod
    def cut(cls, dim: int, spans: Sequence[Sequence[Span]]) -> "Share":
        """Share in which every rank holds only its own spans. If ranks have the same spans, every rank holds the whole
        tensor.
        """
        each = tuple(map(tuple, spans))
        are_shared = len({*chain.from_iterable(each)}) < sum(map(len, each))
        return cls(dim, each, is_whole=are_shared, is_summed=are_shared)

    @property
    def order(self) -> list[int] | None:
        """Index in the uncut tensor of each index of the parts of all ranks, joined in the order of the ranks. None if
        both orders are the same.
        """
        flat = [] if self.is_whole else list(chain.from_iterable(self.spans))
        if all(one[1] == other[0] for one, other in pairwise(flat)):
            return None
        return [index for span in flat for index in range(*span)]

    def size(self, shape: Sequence[int]) -> int:
        """Number of elements of a tensor of this shape that the rank with the largest part holds."""
        held = 1
        for length in shape:
            held *= length
        if self.is_whole:
            return held
        largest = max(sum(stop - start for start, stop in own) for own in self.spans)
        return held // max(shape[self.dim], 1) * largest


WHOLE = Share()
"""Share of a parameter that every rank holds whole, and uses alike."""
SUMMED = Share(is_summed=True)
"""Share of a parameter that every rank holds whole and applies to its own heads or columns."""


def even_spans(name: str, parts: Sequence[int], units: int, num_ranks: int) -> list[list[Span]]:
    """Return the spans of each rank. The ranks divide each part evenly, in whole pieces. If a part has fewer pieces
    than there are ranks, adjacent ranks have the same piece. `units` is the number of pieces of the smallest part; the
    pieces of all parts have the same width. With 0, a piece is one index, and no rank shares it.

    Raises `LayoutError` if the pieces cannot be divided. `name` is the name of the module, for the message.
    """
    width = min(parts) // units if units else 1
    if units and (not width or min(parts) % units or any(part % width for part in parts)):
        raise LayoutError(
            f"`units` of `{name}` must divide the layer's size ({' + '.join(map(str, parts))}) evenly, but is {units}. "
            "Correct the plan."
        )
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    start = 0
    for part in parts:
        pieces = part // width
        if pieces % num_ranks and (not units or num_ranks % pieces):
            more = f", or be a multiple of {pieces}" if units else ""
            what = "number of pieces (`units`)" if units else "size"
            raise LayoutError(
                f"The number of tensor ranks must divide {pieces}, the {what} of a part of `{name}`{more}, "
                f"but is {num_ranks}. Change the layout, or remove the rule."
            )
        each = max(pieces // num_ranks, 1) * width
        for rank in range(num_ranks):
            first = start + rank * pieces // num_ranks * width
            spans[rank].append((first, first + each))
        start += part
    return spans


def uneven_spans(name: str, size: int, num_ranks: int) -> list[list[Span]]:
    """Return the span of each rank, as `torch.chunk` divides a dimension: the last part may be shorter. Raises
    `LayoutError` if a rank would have nothing. `name` is the name of the module, for the message.
    """
    length = -(-size // num_ranks)
    if length * (num_ranks - 1) >= size:
        raise LayoutError(
            f"The number of tensor ranks must leave each rank a part of the {size} rows of `{name}`, but is "
            f"{num_ranks}. Change the layout, or remove the rule."
        )
    return [[(rank * length, min(size, (rank + 1) * length))] for rank in range(num_ranks)]
