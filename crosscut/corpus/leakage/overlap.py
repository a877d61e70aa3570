"""The stage `overlap`: what share of each test set the corpus holds, and with which passages (paper, 4.1.2).

Counted before anything is cut: it is what a model would have seen. An n-gram that many documents have is nothing that
leaked but what people write alike, so the ones found most often are listed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosscut.corpus.documents import read_table
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.leakage.grams import Grams, Numbers, open_grams
from crosscut.corpus.leakage.removal import hits_name, matches_name

MOST = 20
"""Passages of a test set, and frequent n-grams, that are listed."""

SHOWN_CHARACTERS = 500
"""Longest passage that is listed whole."""


def add_up(work: Path, folder: Path, n: int, stage: str, parts: Sequence[str], _output: Output) -> Counts:
    """Task of the stage: one table for each test set, and the most frequent n-grams.

    Reads what the stage `stage` found in the `parts`, one after the other; memory holds a number for each n-gram of the
    test sets.
    """
    grams = open_grams(folder, n)
    documents = np.zeros(len(grams), dtype=np.int64)
    for part in parts:
        hits = read_table(work / stage / hits_name(part))
        documents[hits["gram"].to_numpy()] += hits["documents"].to_numpy()
    places, items = grams.items_of(np.arange(len(grams)))
    found = np.bincount(items[documents[places] > 0], minlength=len(grams.sizes))
    passages = _Passages(grams.set_names)
    for part in parts:
        passages.add(read_table(work / stage / matches_name(part)).to_pylist())
    sets = np.zeros((len(grams.set_names), len(grams)), dtype=np.bool_)
    sets[grams.set_of_item[items], places] = True
    return {
        "test_sets": {
            name: {
                "items": int((grams.set_of_item == place).sum()),
                **_shares(grams.sizes[grams.set_of_item == place], found[grams.set_of_item == place]),
                "grams": int(sets[place].sum()),
                "grams_found": int((sets[place] & (documents > 0)).sum()),
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


def _frequent(grams: Grams, documents: Numbers, sets: np.ndarray[Any, np.dtype[np.bool_]]) -> list[dict[str, Any]]:
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
    """The passages shared with each test set: how many, in how many documents, and the longest."""

    def __init__(self, names: Sequence[str]) -> None:
        self._counts = {name: {"documents_touched": 0, "passages": 0} for name in names}
        self._longest: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def add(self, matches: Sequence[dict[str, Any]]) -> None:
        """Take up the passages of a part."""
        for name, longest in self._longest.items():
            own = [match for match in matches if match["test_set"] == name]
            self._counts[name]["passages"] += len(own)
            self._counts[name]["documents_touched"] += len({match["row"] for match in own})
            self._longest[name] = heapq.nlargest(MOST, [*longest, *self._shown(own)], key=lambda one: one["grams"])

    def of(self, name: str) -> Counts:
        """What there is to say of a test set."""
        return {**self._counts[name], "longest": self._longest[name]}

    @staticmethod
    def _shown(matches: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for match in heapq.nlargest(MOST, matches, key=lambda one: one["grams"]):
            text = match["passage"]
            cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            yield {"grams": match["grams"], "document": match["id"], "item": match["item"], "passage": cut}
