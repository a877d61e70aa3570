"""Divisions of a layer's columns over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """Columns of a layer in parts that stand side by side, each divided over the ranks."""

    parts: tuple[int, ...]
    """Sizes of the parts."""
    units: int = 0
    """Number of equal pieces of the smallest part, if neighbouring ranks may hold the same one. The pieces of all parts
    have the same size.
    """

    def fits(self, num_ranks: int) -> bool:
        """Whether all ranks can have equal columns."""
        return all(self._pieces(part, num_ranks) for part in self.parts)

    def _pieces(self, part: int, num_ranks: int) -> int:
        """Number of different pieces of a part that ranks hold. 0 if the ranks cannot divide it."""
        if not self.units:
            return 0 if part % num_ranks else num_ranks
        number, rest = divmod(part, min(self.parts) // self.units)
        if rest or (number % num_ranks and num_ranks % number):
            return 0
        return min(number, num_ranks)

    def columns(self, rank: int, num_ranks: int) -> Tensor:
        """Return the indices of a rank's columns."""
        found, start = [], 0
        for part in self.parts:
            pieces = self._pieces(part, num_ranks)
            at, size = rank * pieces // num_ranks, part // pieces
            found.append(torch.arange(start + at * size, start + (at + 1) * size))
            start += part
        return torch.cat(found)

    def holders(self, rank: int, num_ranks: int) -> list[int]:
        """Return the ranks that hold some of a rank's columns."""
        own = {*self.columns(rank, num_ranks).tolist()}
        return [each for each in range(num_ranks) if own & {*self.columns(each, num_ranks).tolist()}]

    def is_cut(self, num_ranks: int) -> bool:
        """Whether ranks hold different columns."""
        return self.columns(0, num_ranks).tolist() != self.columns(num_ranks - 1, num_ranks).tolist()


def divisions(num_outputs: int, num_inputs: int, largest: int) -> Iterator[Pieces]:
    """Divisions to try, simple ones first. A layer of `num_outputs` columns leads to one of `num_inputs` rows. A packed
    layer has equal parts, or a part as wide as the rows (queries) and two equal ones (keys and values).
    """
    yield Pieces((num_outputs,))
    for parts in (2, 3):
        if num_outputs % parts == 0:
            yield Pieces((num_outputs // parts,) * parts)
    more = num_outputs - num_inputs
    if more > 0 and more % 2 == 0:
        yield Pieces((num_inputs, more // 2, more // 2))
    for units in range(largest - 1, 0, -1):
        if largest % units == 0:
            yield from (
                Pieces(parts, units)
                for parts in ((num_outputs,), (num_inputs, more // 2, more // 2))
                if min(parts) > 0 and sum(parts) == num_outputs and min(parts) % units == 0
            )
