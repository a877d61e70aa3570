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
    """Number of equal pieces of a part, if neighbouring ranks may hold the same one."""

    def fits(self, num_ranks: int) -> bool:
        """Whether all ranks can have equal columns."""
        if self.units and self.units < num_ranks:
            return num_ranks % self.units == 0 and all(part % self.units == 0 for part in self.parts)
        return all(part % num_ranks == 0 for part in self.parts)

    def columns(self, rank: int, num_ranks: int) -> Tensor:
        """Return the indices of a rank's columns."""
        pieces = min(self.units or num_ranks, num_ranks)
        at, found, start = rank * pieces // num_ranks, [], 0
        for part in self.parts:
            size = part // pieces
            found.append(torch.arange(start + at * size, start + (at + 1) * size))
            start += part
        return torch.cat(found)

    def holders(self, rank: int, num_ranks: int) -> list[int]:
        """Return the ranks that hold the same columns as a rank."""
        pieces = min(self.units or num_ranks, num_ranks)
        return [each for each in range(num_ranks) if each * pieces // num_ranks == rank * pieces // num_ranks]

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
        if largest % units == 0 and num_outputs % units == 0:
            yield Pieces((num_outputs,), units)
