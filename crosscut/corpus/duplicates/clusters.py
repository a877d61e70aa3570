"""Form clusters of near-duplicates, and keep the best document of each cluster.

A cluster is a set of documents that are connected by chains of near-duplicates. The best document of a cluster is the
first one in this order: documents of earlier runs come before documents of this run, then longer documents before
shorter ones, and then documents with lower numbers before documents with higher numbers. Memory is about 100 bytes for
each pair of near-duplicates. Texts are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from crosscut.corpus.collection import Collection, Numbers, begins_run
from crosscut.corpus.documents import write_table
from crosscut.corpus.duplicates.candidates import preference
from crosscut.corpus.duplicates.similarity import Edges, concatenate, count_pairs, read_edges
from crosscut.corpus.duplicates.sketches import read_lengths
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.words.ngrams import Places

CLUSTERS = "clusters"
NEAR = "near"
LARGEST = 20
"""Maximum number of clusters that the report lists."""

SHOWN = 20
"""Maximum number of documents that are listed per cluster."""

MATCHES = pa.schema([("number", pa.uint64()), ("other", pa.string()), ("jaccard", pa.float64())])
"""Columns of the file with the documents to drop: `number` is the document's number, ascending; `other` is the id of a
similar document (see `Collection.ids`); `jaccard` is the similarity of these two documents."""


class Clusters(NamedTuple):
    """Numbers of documents that have near-duplicates, cluster by cluster. The first document of a cluster is kept."""

    numbers: Numbers
    starts: Places
    """Index in `numbers` of each cluster's first document."""

    def sizes(self) -> Places:
        """Number of documents of each cluster."""
        return np.diff(self.starts, append=len(self.numbers))

    def kept(self) -> Numbers:
        """For each document in `numbers`, the number of the document that its cluster keeps."""
        return np.repeat(self.numbers[self.starts], self.sizes())


def join(
    collection: Collection, files: Sequence[Path], refused: Sequence[Path], candidates: int, output: Output
) -> Counts:
    """Run the task: form clusters from all pairs of near-duplicates, and write the documents to drop.

    `files` hold the near-duplicates, `refused` the other compared pairs. `candidates` is the number of candidate pairs.
    """
    edges = read_edges(files)
    clusters = find_clusters(collection, edges)
    matches = best_matches(edges, clusters)
    new = ~collection.is_earlier(matches.left)
    others = collection.ids(matches.right[new])
    rows = {"number": matches.left[new], "other": others, "jaccard": matches.jaccard[new]}
    write_table(output.path("matches.arrow"), rows, MATCHES)
    sizes = Counter(clusters.sizes().tolist())
    return {
        **count_pairs([*files, *refused], candidates=candidates),
        "clusters": len(clusters.starts),
        "sizes": {str(size): sizes[size] for size in sorted(sizes)},
        "largest": _largest(collection, clusters),
    }


def find_clusters(collection: Collection, edges: Edges) -> Clusters:
    """Find the clusters: sets of documents that are connected by chains of near-duplicates. The clusters are ordered by
    their lowest document number.
    """
    numbers, places = np.unique(np.concatenate([edges.left, edges.right]), return_inverse=True)
    labels = connect(places[: len(edges.left)], places[len(edges.left) :], len(numbers))
    ranks = np.empty(len(numbers), np.int64)
    lengths = read_lengths(collection, numbers)
    ranks[preference(collection.is_earlier(numbers), lengths, numbers)] = np.arange(len(numbers))
    order = np.lexsort((ranks, labels))
    return Clusters(numbers[order], np.flatnonzero(begins_run(labels[order])))


def connect(left: Places, right: Places, count: int) -> Places:
    """For each of `count` nodes, find the lowest node of its connected component.

    `left` and `right` are the ends of the edges. The algorithm is union-find on arrays: each round attaches the roots
    of both ends of an edge to the lower root, and then makes every node point to its root.
    """
    labels = np.arange(count)
    while len(left):
        low = np.minimum(labels[left], labels[right])
        np.minimum.at(labels, labels[left], low)
        np.minimum.at(labels, labels[right], low)
        while not np.array_equal(labels, labels[labels]):
            labels = labels[labels]
        apart = labels[left] != labels[right]
        left, right = left[apart], right[apart]
    return labels


def best_matches(edges: Edges, clusters: Clusters) -> Edges:
    """Choose, for each dropped document, the document that is reported as its match.

    The match is the document that the cluster keeps, if the dropped document is a near-duplicate of this document.
    Otherwise, the match is the most similar near-duplicate. In the result, `left` holds the dropped documents in
    ascending order.
    """
    stays = np.zeros(len(clusters.numbers), dtype=bool)
    stays[clusters.starts] = True
    order = np.argsort(clusters.numbers)
    numbers, kept, stays = clusters.numbers[order], clusters.kept()[order], stays[order]
    edges = concatenate([edges, Edges(edges.right, edges.left, edges.jaccard)])
    edges = edges.at(~stays[np.searchsorted(numbers, edges.left)])
    is_kept = kept[np.searchsorted(numbers, edges.left)] == edges.right
    edges = edges.at(np.lexsort((edges.right, -edges.jaccard, ~is_kept, edges.left)))
    return edges.at(begins_run(edges.left))


def _largest(collection: Collection, clusters: Clusters) -> list[dict[str, object]]:
    sizes = clusters.sizes()
    shown = []
    for place in np.argsort(-sizes, kind="stable")[:LARGEST].tolist():
        start = clusters.starts[place]
        members = clusters.numbers[start : start + min(SHOWN, sizes[place])]
        ids = collection.ids(members)
        shown.append({"documents": int(sizes[place]), "kept": ids[0], "dropped": ids[1:]})
    return shown
