"""How wide the search must be: bands and rows from the similarity and the recall that a user states.

A MinHash value of two documents is equal with probability J, their Jaccard similarity. A band is `rows` values; a pair
is found when all values of one of the `bands` are equal, and then passes when enough of all values are:

    P(found) = 1 - (1 - J^rows)^bands        P(passes) >= P(found) - LOSS * (1 - recall)
"""

from __future__ import annotations

import math
from typing import NamedTuple

LOSS = 0.05
"""Share of the pairs that may be missed which the look at whole sketches may cost; the bands make up for it."""

CLOSE_PAIR = 300.0
"""What it costs to compare two texts, in MinHash values of one document."""

FAR_PAIRS = 300_000.0
"""What it would cost to compare a document's sketch with those of the hundred thousand others that have some phrases in
common with it, a similarity of `FAR`, in the same unit."""

FAR = 0.03

_MAX_HASHES = 1024


class Bands(NamedTuple):
    """A shape of the search."""

    bands: int
    rows: int

    @property
    def num_hashes(self) -> int:
        """MinHash values of a document."""
        return self.bands * self.rows

    def recall(self, jaccard: float) -> float:
        """Share of the pairs of a similarity that have a band in common."""
        return 1 - (1 - jaccard**self.rows) ** self.bands


def choose_bands(jaccard: float, recall: float) -> Bands:
    """The cheapest shape that finds a share `recall` of the pairs at exactly `jaccard`, and so more of closer ones.

    The cost of a document is its MinHash values, and the pairs below `jaccard` that it is found in: with one neighbour
    whose similarity is anything up to `jaccard` alike, and with very many that are far from it.
    """
    needed = recall + LOSS * (1 - recall)
    shapes = []
    for rows in range(1, 33):
        bands = max(1, math.ceil(math.log(1 - needed) / math.log1p(-(jaccard**rows)) - 1e-9))
        if bands * rows <= _MAX_HASHES:
            shapes.append(Bands(bands, rows))
    return min(shapes, key=lambda shape: (_cost(shape, jaccard), shape))


def _cost(shape: Bands, jaccard: float) -> float:
    return shape.num_hashes + CLOSE_PAIR * _mean_recall(shape, jaccard) + FAR_PAIRS * shape.recall(FAR)


def _mean_recall(shape: Bands, jaccard: float, steps: int = 100) -> float:
    return sum(shape.recall(jaccard * (step + 0.5) / steps) for step in range(steps)) / steps


def least_equal(shape: Bands, jaccard: float, recall: float) -> int:
    """Equal values that a pair must have to be looked at further: at `jaccard`, only LOSS * (1 - recall) have fewer."""
    budget = LOSS * (1 - recall)
    below = 0.0
    for equal in range(shape.num_hashes + 1):
        below += math.comb(shape.num_hashes, equal) * jaccard**equal * (1 - jaccard) ** (shape.num_hashes - equal)
        if below > budget:
            return equal
    return shape.num_hashes
