"""Plan of the messages with which ranks fetch positions of one dimension that other ranks hold. This module imports no
torch.

    rank 0 holds     |-------|                    rank 1 fetches  ....|----------|....
    rank 1 holds             |-------|            from rank 0         |--|
    rank 2 holds                     |-------|    from rank 2                 |--|

A rank sends another rank the overlap of the positions that it holds and the positions that the other rank fetches. The
overlap may be empty, and it may be with ranks that are no neighbours.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Range(NamedTuple):
    """Consecutive positions, from `start` up to and without `stop`. A range may leave the dimension."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.stop - self.start

    def overlap(self, other: "Range") -> "Range":
        """Return the positions that both ranges have; an empty range at the start of this one if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Range(start, stop) if start < stop else Range(self.start, self.start)


class Piece(NamedTuple):
    """Consecutive positions that one rank fetches from one rank, which may be the rank itself."""

    giver: int
    first: int
    """Index of the first position in the tensor of the rank that holds the positions."""
    size: int


@dataclass(frozen=True)
class ExchangePlan:
    """Positions of one dimension that ranks hold, and positions that they fetch."""

    held: tuple[tuple[Range, ...], ...]
    """Positions that each rank holds, as ranges that follow one another in the rank's tensor. No two ranges overlap."""
    wants: tuple[tuple[Range, ...], ...]
    """Positions that each rank fetches, as ranges that follow one another in the fetched tensor."""

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces of which the fetched tensor of each rank consists, in their order."""
        return tuple(tuple(piece for want in wants for piece in self._pieces_of(want)) for wants in self.wants)

    def rows(self, giver: int, taker: int) -> int:
        """Return the number of positions that `taker` fetches from `giver`."""
        return sum(piece.size for piece in self.pieces[taker] if piece.giver == giver)

    @cached_property
    def sent(self) -> int:
        """Number of positions that ranks fetch from other ranks. If it is 0, no message is sent."""
        return sum(piece.size for taker, own in enumerate(self.pieces) for piece in own if piece.giver != taker)

    def _pieces_of(self, want: Range) -> list[Piece]:
        found = []
        for giver, ranges in enumerate(self.held):
            index = 0
            for held in ranges:
                both = held.overlap(want)
                if both.size:
                    found.append((both.start, Piece(giver, index + both.start - held.start, both.size)))
                index += held.size
        return [piece for _, piece in sorted(found)]
