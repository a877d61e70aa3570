"""The stage `overlap`: compute the share of each test set that the corpus contains, and list shared passages (paper,
4.1.2).

The paper's overlap is "the percentage of test set 8-grams that also appear in our training set". It is counted here
over the distinct n-grams of a test set, and over all documents of the corpus, before some become validation data. There
are three counts for each test set: `grams_found` of the corpus before anything is dropped or cut, `grams_left` of what
is left, both confirmed word by word, and `grams_let_through` of what is left by a Bloom filter alone, as in the paper
(`corpus_filter`). An n-gram that occurs in many documents is a common phrase and not a leak, so the most frequent
n-grams of the corpus before the removal are listed too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.corpus.documents import Part, read_table
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.leakage.corpus_filter import CORPUS_FILTER, MARKS_SUFFIX, FilterSize, let_through
from crosscut.corpus.leakage.grams import Grams, Numbers, open_grams
from crosscut.corpus.leakage.removal import HITS_SUFFIX, LEAKAGE, MATCHES_SUFFIX

MOST = 20
"""Maximum number of passages listed per test set, and maximum number of frequent n-grams listed."""

PAPER_OVERLAPS = {"WikiText-103": 0.108, "LAMBADA": 0.014}
"""Shares of the 8-grams of the paper's test sets that its filter finds in its training set (section 4.1.2)."""

SHOWN_CHARACTERS = 500
"""Maximum number of characters of a listed passage. A longer passage is truncated."""


def add_up(folder: Path, n: int, parts: Sequence[Part], size: FilterSize | None, _output: Output) -> Counts:
    """Run the stage's task: compute the overlap of the corpus with each test set, and list the most frequent n-grams.

    `folder` holds the n-grams of the test sets. `size` is the size of the filter that the stage `corpus-filter` filled,
    or None without this stage. The results of earlier stages are read part by part. Memory therefore grows with the
    n-grams of the test sets and not with the corpus.
    """
    grams = open_grams(folder, n)
    documents, left = np.zeros((2, len(grams)), dtype=np.int64)
    for part in parts:
        hits = read_table(part.file(LEAKAGE, HITS_SUFFIX))
        documents[hits["gram"].to_numpy()] += hits["documents"].to_numpy()
        left[hits["gram"].to_numpy()] += hits["left"].to_numpy()
    places, items = grams.items_of(np.arange(len(grams)))
    found = np.bincount(items[documents[places] > 0], minlength=len(grams.sizes))
    passages = _Passages(grams.set_names)
    for part in parts:
        passages.add(read_table(part.file(LEAKAGE, MATCHES_SUFFIX)).to_pylist())
    sets = np.zeros((len(grams.set_names), len(grams)), dtype=np.bool_)
    sets[grams.set_of_item[items], places] = True
    counted = {"grams_found": documents > 0, "grams_left": left > 0}
    if size:
        files = [part.file(CORPUS_FILTER, MARKS_SUFFIX) for part in parts]
        counted["grams_let_through"] = let_through(folder, n, size, files)
    return {
        "test_sets": {
            name: {
                "items": int((grams.set_of_item == place).sum()),
                **_shares(grams.sizes[grams.set_of_item == place], found[grams.set_of_item == place]),
                "grams": int(sets[place].sum()),
                **{key: int((sets[place] & chosen).sum()) for key, chosen in counted.items()},
                **passages.of(name),
            }
            for place, name in enumerate(grams.set_names)
        },
        "frequent": _frequent(grams, documents, sets),
    }


def _shares(sizes: Numbers, found: Numbers) -> Counts:
    return {
        "items_too_short": int((sizes == 0).sum()),
        "items_touched": int((found > 0).sum()),
        "items_half_found": int(((found > 0) & (2 * found >= sizes)).sum()),
    }


def _frequent(grams: Grams, documents: Numbers, sets: npt.NDArray[np.bool_]) -> list[Counts]:
    most = np.argsort(-documents, kind="stable")[:MOST]
    return [
        {
            "gram": grams.texts[number].as_py(),
            "documents": int(documents[number]),
            "test_sets": [grams.set_names[place] for place in np.flatnonzero(sets[:, number])],
        }
        for number in most.tolist()
        if documents[number]
    ]


class _Passages:
    """Passages of each test set: the number of shared passages, the number of documents with passages, and the longest
    passages.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._counts = {name: {"documents_touched": 0, "passages": 0} for name in names}
        self._longest: dict[str, list[Counts]] = {name: [] for name in names}

    def add(self, matches: Sequence[Counts]) -> None:
        """Add the passages that were found in one part of the corpus."""
        for name, longest in self._longest.items():
            own = [match for match in matches if match["test_set"] == name]
            self._counts[name]["passages"] += len(own)
            self._counts[name]["documents_touched"] += len({match["row"] for match in own})
            self._longest[name] = heapq.nlargest(MOST, [*longest, *self._shown(own)], key=lambda one: one["grams"])

    def of(self, name: str) -> Counts:
        """Return the counts and the longest passages of a test set."""
        return {**self._counts[name], "longest": self._longest[name]}

    @staticmethod
    def _shown(matches: Sequence[Counts]) -> Iterator[Counts]:
        for match in heapq.nlargest(MOST, matches, key=lambda one: one["grams"]):
            text = match["passage"]
            cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            yield {"grams": match["grams"], "document": match["id"], "item": match["item"], "passage": cut}
