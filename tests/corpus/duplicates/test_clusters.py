"""Clusters are what pairs connect; the best of each stays, and each that goes names whom it is like."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.corpus.duplicates.clusters import Clusters, best_matches, connect
from crosscut.corpus.duplicates.similarity import Edges

COUNT = 25
PAIRS = st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), max_size=40)


@settings(max_examples=40)
@given(PAIRS)
def test_labels_are_the_lowest_of_what_is_connected(pairs):
    expected = list(range(COUNT))
    for _ in pairs:  # as many rounds as the longest chain can need
        for one, other in pairs:
            expected[one] = expected[other] = min(expected[one], expected[other])
    left, right = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    assert connect(left, right, COUNT).tolist() == expected


def test_a_long_chain_is_one_cluster():
    chain = np.random.default_rng(0).permutation(5000)
    assert set(connect(chain[:-1], chain[1:], 5000).tolist()) == {0}


def edges(*rows: tuple[int, int, float]) -> Edges:
    left, right, jaccard = zip(*rows, strict=True)
    return Edges(np.array(left, np.uint64), np.array(right, np.uint64), np.array(jaccard))


def test_the_match_is_the_kept_document_and_else_the_most_similar():
    clusters = Clusters(np.array([3, 1, 2, 4], np.uint64), np.array([0]))
    matches = best_matches(edges((1, 2, 0.95), (1, 3, 0.75), (2, 4, 0.8), (1, 4, 0.7)), clusters)
    assert list(zip(*(column.tolist() for column in matches), strict=True)) == [
        (1, 3, 0.75), (2, 1, 0.95), (4, 2, 0.8),
    ]  # fmt: skip


def test_clusters_know_their_sizes_and_who_stays():
    clusters = Clusters(np.array([5, 9, 7, 2, 3], np.uint64), np.array([0, 3]))
    assert clusters.sizes().tolist() == [3, 2]
    assert clusters.kept().tolist() == [5, 5, 5, 2, 2]
