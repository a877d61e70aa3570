"""Choose the bands and rows of the MinHash search from the similarity and the recall that the user sets.

The sketch of a document consists of MinHash values. Each value is equal in two documents with probability J, the
Jaccard similarity of the documents. Sketches are divided into `bands`, each with `rows` values. A pair of documents is
found if all values of at least one band are equal. A found pair then passes if enough values of the whole sketches are
equal:

    P(found) = 1 - (1 - J^rows)^bands        P(passes) >= P(found) - LOSS * (1 - recall)
"""

from __future__ import annotations

import math
from typing import NamedTuple

LOSS = 0.05
"""Share of the allowed misses (1 - recall) that the comparison of whole sketches may cause. The bands are chosen for a
higher recall, so that the search as a whole reaches the recall that the user sets."""

CLOSE_PAIR = 300.0
"""Cost of comparing the texts of two documents. The unit is the cost of computing one MinHash value of one document."""

FAR_PAIRS = 300_000.0
"""Cost of comparing a document's sketch with the sketches of 100,000 documents that have similarity `FAR` to it. The
unit is the cost of computing one MinHash value of one document. In a large corpus, about 100,000 documents share some
phrases with an average document."""

FAR = 0.03
"""Jaccard similarity of two documents that only share some phrases."""

_MAX_HASHES = 1024

_STEPS = 100
"""Number of similarities over which the recall is averaged."""


class Bands(NamedTuple):
    """Shape of the search: the number of bands, and the number of rows (MinHash values) in each band."""

    bands: int
    rows: int

    @property
    def num_hashes(self) -> int:
        """Number of MinHash values of a document."""
        return self.bands * self.rows

    def recall(self, jaccard: float) -> float:
        """Expected fraction of the pairs with the given Jaccard similarity that have at least one equal band."""
        return 1 - (1 - jaccard**self.rows) ** self.bands


def choose_bands(jaccard: float, recall: float) -> Bands:
    """Choose the cheapest bands and rows that find at least a fraction `recall` of the pairs with Jaccard similarity
    `jaccard`.

    Pairs with a higher similarity are found with a higher recall. The cost of a document is the cost of its MinHash
    values plus the cost of comparing it with documents whose similarity to it is below `jaccard`. The cost model
    assumes that each document has one neighbour whose similarity is uniform between 0 and `jaccard`, and very many
    neighbours of similarity `FAR`.
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


def _mean_recall(shape: Bands, jaccard: float) -> float:
    return sum(shape.recall(jaccard * (step + 0.5) / _STEPS) for step in range(_STEPS)) / _STEPS


def least_equal(shape: Bands, jaccard: float, recall: float) -> int:
    """Minimum number of equal MinHash values that a pair must have for its texts to be compared.

    At most a fraction `LOSS * (1 - recall)` of the pairs with Jaccard similarity `jaccard` has fewer equal values.
    """
    budget = LOSS * (1 - recall)
    below = 0.0
    for equal in range(shape.num_hashes + 1):
        below += math.comb(shape.num_hashes, equal) * jaccard**equal * (1 - jaccard) ** (shape.num_hashes - equal)
        if below > budget:
            return equal
    return shape.num_hashes
