"""The shape of the search keeps the recall that was asked for."""

import math

import pytest

from crosscut.corpus.duplicates.bands import LOSS, Bands, choose_bands, least_equal


@pytest.mark.parametrize("jaccard", [0.3, 0.5, 0.7, 0.85, 0.99])
@pytest.mark.parametrize("recall", [0.5, 0.9, 0.99, 0.9999])
def test_bands_and_the_look_at_sketches_together_keep_the_recall(jaccard, recall):
    shape = choose_bands(jaccard, recall)
    least = least_equal(shape, jaccard, recall)

    def fewer(equal):
        count = shape.num_hashes
        return sum(math.comb(count, n) * jaccard**n * (1 - jaccard) ** (count - n) for n in range(equal))

    assert fewer(least) <= LOSS * (1 - recall) < fewer(least + 1)
    assert shape.recall(jaccard) - fewer(least) >= recall
    assert shape.recall((1 + jaccard) / 2) > shape.recall(jaccard)


def test_the_papers_similarity_takes_seventeen_bands_of_four():
    assert choose_bands(0.7, 0.99) == Bands(17, 4)
    assert Bands(17, 4).num_hashes == 68


def test_more_recall_costs_no_fewer_hashes():
    counts = [choose_bands(0.7, recall).num_hashes for recall in (0.9, 0.99, 0.999, 0.9999)]
    assert counts == sorted(counts)


def test_a_high_similarity_has_long_bands():
    assert choose_bands(0.95, 0.99).rows > choose_bands(0.5, 0.99).rows
