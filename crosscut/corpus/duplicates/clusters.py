"""Clusters: documents that a chain of near-duplicates connects; the best of each stays.

The best document is one of an earlier run, where there is one, and else the longest, and of equally long ones the first
in the order of the corpus. Memory is some 100 bytes for each pair of near-duplicates; texts are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from crosscut.corpus.collection import Collection, Numbers, first_number
from crosscut.corpus.documents import Drop, Part, drops_name, read_table, write_drops, write_table
from crosscut.corpus.duplicates.candidates import preference
from crosscut.corpus.duplicates.similarity import Edges, concatenate
from crosscut.corpus.duplicates.sketches import read_lengths
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.filters.judging import count_rows
from crosscut.corpus.occurrences import rows_of_part
from crosscut.corpus.words.ngrams import Places

CLUSTERS = "clusters"
NEAR = "near"
RULE = "near-duplicate"
LARGEST = 20
"""Clusters that the report shows."""

SHOWN = 20
"""Documents of each."""

MATCHES = pa.schema([("number", pa.uint64()), ("other", pa.string()), ("jaccard", pa.float64())])
"""Documents that go, ascending, and a document that each was found to be like, as `Collection.ids` names it."""


class Clusters(NamedTuple):
    """Documents with near-duplicates, one cluster after the other, the one that stays first in each."""

    numbers: Numbers
    starts: Places
    """Where each cluster begins."""

    def sizes(self) -> Places:
        """Documents of each."""
        return np.diff(self.starts, append=len(self.numbers))

    def kept(self) -> Numbers:
        """Of each document, the one of its cluster that stays."""
        return np.repeat(self.numbers[self.starts], self.sizes())


def join(collection: Collection, files: Sequence[Path], output: Output) -> Counts:
    """Task: clusters from all near-duplicates, and who goes."""
    tables = [read_table(path) for path in files]
    edges = concatenate([Edges(*(table[name].to_numpy() for name in Edges._fields)) for table in tables])
    clusters = find_clusters(collection, edges)
    matches = best_matches(edges, clusters)
    new = ~collection.is_earlier(matches.left)
    others = collection.ids(matches.right[new])
    rows = {"number": matches.left[new], "other": others, "jaccard": matches.jaccard[new]}
    write_table(output.path("matches.arrow"), rows, MATCHES)
    sizes = Counter(clusters.sizes().tolist())
    return {
        "clusters": len(clusters.starts),
        "sizes": {str(size): sizes[size] for size in sorted(sizes)},
        "largest": _largest(collection, clusters),
    }


def find_clusters(collection: Collection, edges: Edges) -> Clusters:
    """The clusters that pairs connect, those with the lowest number in front."""
    numbers, places = np.unique(np.concatenate([edges.left, edges.right]), return_inverse=True)
    labels = connect(places[: len(edges.left)], places[len(edges.left) :], len(numbers))
    ranks = np.empty(len(numbers), np.int64)
    lengths = read_lengths(collection, numbers)
    ranks[preference(collection.is_earlier(numbers), lengths, numbers)] = np.arange(len(numbers))
    order = np.lexsort((ranks, labels))
    return Clusters(numbers[order], np.flatnonzero(np.diff(labels[order], prepend=-1)))


def connect(left: Places, right: Places, count: int) -> Places:
    """Of each of `count` things the lowest that pairs connect it with.

    Union-find on arrays: each round hooks the roots of every pair onto the lower one and lets all point at their roots.
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
    """Of each document that goes, ascending: the one that stays, where they are a pair, and else its most similar."""
    stays = np.zeros(len(clusters.numbers), dtype=bool)
    stays[clusters.starts] = True
    order = np.argsort(clusters.numbers)
    numbers, kept, stays = clusters.numbers[order], clusters.kept()[order], stays[order]
    one = np.concatenate([edges.left, edges.right])
    other = np.concatenate([edges.right, edges.left])
    jaccard = np.concatenate([edges.jaccard, edges.jaccard])
    goes = ~stays[np.searchsorted(numbers, one)]
    one, other, jaccard = one[goes], other[goes], jaccard[goes]
    is_kept = kept[np.searchsorted(numbers, one)] == other
    order = np.lexsort((other, -jaccard, ~is_kept, one))
    one, other, jaccard = one[order], other[order], jaccard[order]
    best = np.ones(len(one), dtype=bool)
    best[1:] = one[1:] != one[:-1]
    return Edges(one[best], other[best], jaccard[best])


def _largest(collection: Collection, clusters: Clusters) -> list[dict[str, Any]]:
    sizes = clusters.sizes()
    shown = []
    for place in np.argsort(-sizes, kind="stable")[:LARGEST].tolist():
        start = clusters.starts[place]
        members = clusters.numbers[start : start + min(SHOWN, sizes[place])]
        ids = collection.ids(members)
        shown.append({"documents": int(sizes[place]), "kept": ids[0], "dropped": ids[1:]})
    return shown


def drop_near(part: Part, index: int, matches: Path, output: Output) -> Counts:
    """Task: drops of the part at `index`."""
    table = rows_of_part(read_table(matches), index)
    rows = (table["number"].to_numpy() - first_number(index)).tolist()
    drops = [
        Drop(row, RULE, f"{jaccard:.2f}", other)
        for row, jaccard, other in zip(rows, table["jaccard"].to_pylist(), table["other"].to_pylist(), strict=True)
    ]
    write_drops(output.path(drops_name(part.name)), drops)
    return count_rows(part.sizes(), drops)
