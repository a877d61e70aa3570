"""Similarity: which candidates are near-duplicates, by the exact Jaccard similarity of their sets of n-grams.

    J(A, B) = |A and B| / |A or B|

Candidates whose whole sketches have too few values in common are left out first, which loses at `jaccard` no more than
`crosscut.corpus.duplicates.bands` allows for. Only texts of the others are read, some megabytes at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.corpus.collection import Collection, Numbers
from crosscut.corpus.documents import read_table, write_table
from crosscut.corpus.duplicates.candidates import Pairs, distinct, pairs_name
from crosscut.corpus.duplicates.sketches import Sketches, read_lengths, read_sketches
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.words.ngrams import Hashed, Hashes, Places, hash_words, ngrams

SIMILAR = "similar"
PAIRS_PER_TASK = 1024
CHARACTERS_AT_A_TIME = 8_000_000

EDGES = pa.schema([("left", pa.uint64()), ("right", pa.uint64()), ("jaccard", pa.float64())])
"""Pairs that are similar enough, ascending."""

Similarities = npt.NDArray[np.float64]


Groups = tuple[tuple[Path, list[int]], ...]
"""Large groups by the file and the rows that they stand in."""


class Check(NamedTuple):
    """When two documents are near-duplicates."""

    ngram: int
    jaccard: float
    least_equal: int
    """MinHash values that must be equal before texts are read."""


class Edges(NamedTuple):
    """Pairs and their exact similarity."""

    left: Numbers
    right: Numbers
    jaccard: Similarities


def check_pairs(
    collection: Collection, check: Check, folder: Path, bounds: tuple[int, int], name: str, output: Output
) -> Counts:
    """Task: the near-duplicates among the pairs in a folder whose left number lies within bounds."""
    found = []
    for path in sorted(folder.glob(pairs_name("*"))):
        table = read_table(path)
        start, stop = np.searchsorted(table["left"].to_numpy(), np.array(bounds, np.uint64)).tolist()
        some = table.slice(start, stop - start)
        found.append(Pairs(some["left"].to_numpy(), some["right"].to_numpy()))
    pairs = distinct(found)
    passed = _pass_sketches(collection, pairs, check.least_equal)
    measured = measure(collection, passed, check.ngram)
    return _write(output.path(f"{name}.arrow"), [measured], check, candidates=len(pairs.left))


def share_groups(files: Sequence[Path], members_per_task: int) -> list[Groups]:
    """The groups in files by tasks with so many members each; those with the same first member fall to one task."""
    columns = [read_table(path)["members"].combine_chunks() for path in files]
    count = -(-sum(len(column.flatten()) for column in columns) // members_per_task)
    found: list[list[tuple[Path, list[int]]]] = [[] for _ in range(count)]
    for path, column in zip(files, columns, strict=True):
        if len(column):
            task = column.flatten().to_numpy()[column.offsets.to_numpy()[:-1]] % np.uint64(count)
            order = np.argsort(task, kind="stable")
            tasks, starts = np.unique(task[order], return_index=True)
            for at, rows in zip(tasks.tolist(), np.split(order, starts[1:]), strict=True):
                found[at].append((path, rows.tolist()))
    return [tuple(groups) for groups in found]


def check_groups(collection: Collection, check: Check, groups: Groups, name: str, output: Output) -> Counts:
    """Task: the near-duplicates in some large groups."""
    measured: list[Edges] = []
    known: dict[int, Edges] = {}
    for path, rows in groups:
        members = read_table(path)["members"]
        for row in rows:
            measured += compare_group(collection, check, np.asarray(members[row].values.to_numpy()), known)
    return _write(output.path(f"{name}.arrow"), measured, check, candidates=sum(len(edges.left) for edges in measured))


def compare_group(collection: Collection, check: Check, members: Numbers, known: dict[int, Edges]) -> Iterator[Edges]:
    """Similarities of each member that is no duplicate of one before it to all behind it that are none either.

    `known` holds what was measured of a document in other groups, and takes up what is new.
    """
    ordered = np.sort(members)
    sketches = read_sketches(collection, ordered)
    left = members
    while len(left) > 1:
        leader, left = left[0], left[1:]
        rest = left[~collection.is_earlier(left)] if collection.is_earlier(leader) else left
        before = known.get(int(leader))
        others = np.sort(rest if before is None else rest[~np.isin(rest, before.right)])
        equal = sketches.values[np.searchsorted(ordered, others)] == sketches.values[np.searchsorted(ordered, leader)]
        others = others[equal.sum(axis=1) >= check.least_equal]
        edges = measure(collection, Pairs(np.full(len(others), leader), others), check.ngram)
        yield edges
        both = concatenate([edges] if before is None else [before, edges])
        known[int(leader)] = both
        left = left[~np.isin(left, both.right[both.jaccard >= check.jaccard])]


def concatenate(edges: Sequence[Edges]) -> Edges:
    """Edges of several places, end to end."""
    left = np.concatenate([np.empty(0, np.uint64), *(some.left for some in edges)])
    right = np.concatenate([np.empty(0, np.uint64), *(some.right for some in edges)])
    return Edges(left, right, np.concatenate([np.empty(0, np.float64), *(some.jaccard for some in edges)]))


def _pass_sketches(collection: Collection, pairs: Pairs, least_equal: int) -> Pairs:
    passed = [equal_values(read_sketches(collection, np.unique(np.concatenate(some))), some) for some in _slices(pairs)]
    enough = np.concatenate([np.empty(0, np.int64), *passed]) >= least_equal
    return Pairs(pairs.left[enough], pairs.right[enough])


def _slices(pairs: Pairs) -> Iterator[Pairs]:
    for start in range(0, len(pairs.left), PAIRS_PER_TASK):
        yield Pairs(*(column[start : start + PAIRS_PER_TASK] for column in pairs))


def equal_values(sketches: Sketches, pairs: Pairs) -> Places:
    """How many values each pair has in common."""
    left, right = (np.searchsorted(sketches.numbers, column) for column in pairs)
    return np.asarray((sketches.values[left] == sketches.values[right]).sum(axis=1))


def measure(collection: Collection, pairs: Pairs, ngram: int) -> Edges:
    """Exact similarity of pairs, ordered by their left number."""
    found = [np.empty(0, np.float64)]
    for some, numbers in _portions(collection, pairs):
        grams = ngrams(hash_words(document.text for document in collection.documents(numbers)), ngram)
        found.append(jaccards(grams, *(np.searchsorted(numbers, column) for column in some)))
    return Edges(*pairs, np.concatenate(found))


def _portions(collection: Collection, pairs: Pairs) -> Iterator[tuple[Pairs, Numbers]]:
    """Pairs in portions with not too much text, and the documents of each."""
    if not len(pairs.left):
        return
    numbers = np.unique(np.concatenate(pairs))
    lengths = read_lengths(collection, numbers).astype(np.int64)
    left, right = (lengths[np.searchsorted(numbers, column)] for column in pairs)
    portion = np.cumsum(left + right) // CHARACTERS_AT_A_TIME
    starts = np.flatnonzero(np.diff(portion, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(portion)], strict=True):
        some = Pairs(*(column[start:stop] for column in pairs))
        yield some, np.unique(np.concatenate(some))


def jaccards(grams: Hashed, left: Places, right: Places) -> Similarities:
    """Similarities of pairs of documents by their places; those with the same left one must follow each other."""
    sets = [as_set(grams.of(place)) for place in range(len(grams.starts) - 1)]
    found = np.empty(len(left), np.float64)
    starts = np.flatnonzero(np.diff(left, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(left)], strict=True):
        found[start:stop] = similarities(sets[left[start]], [sets[place] for place in right[start:stop]])
    return found


def as_set(grams: Hashes) -> Hashes:
    """N-grams ascending, each once; for a few thousand a sort is much faster than the hash table of `np.unique`."""
    ordered = np.sort(grams)
    new = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


def similarities(one: Hashes, others: Sequence[Hashes]) -> Similarities:
    """Similarity of a set of n-grams, ascending, to others, all without repetition and not empty."""
    sizes = np.fromiter(map(len, others), np.int64, len(others))
    grams = np.concatenate(others)
    places = np.searchsorted(one, grams)
    places[places == len(one)] = 0
    common = np.add.reduceat((one[places] == grams).astype(np.int64), np.cumsum(sizes) - sizes)
    return np.asarray(common / (len(one) + sizes - common))


def refused_name(task: str) -> str:
    """Name of the Arrow file of a task's pairs that were compared and are not similar enough.

    Those that are stand in all files that end in `.arrow`.
    """
    return f"{task}.refused"


def _write(path: Path, measured: Sequence[Edges], check: Check, *, candidates: int) -> Counts:
    edges = concatenate(measured)
    left, right = np.minimum(edges.left, edges.right), np.maximum(edges.left, edges.right)
    order = np.lexsort((right, left))
    edges = Edges(left[order], right[order], edges.jaccard[order])
    similar = edges.jaccard >= check.jaccard
    for file, chosen in ((path, similar), (path.with_name(refused_name(path.stem)), ~similar)):
        write_table(file, {name: column[chosen] for name, column in edges._asdict().items()}, EDGES)
    return {"candidates": candidates, "compared": len(edges.left), "similar": int(similar.sum())}


def count_pairs(files: Sequence[Path], *, candidates: int) -> Counts:
    """Counts of all tasks' pairs, each once: a pair of a large group may stand in others, and among the pairs.

    `candidates` is the sum over the tasks; what was compared again was a candidate again.
    """
    tables = [read_table(path) for path in files]
    edges = concatenate([Edges(*(table[name].to_numpy() for name in Edges._fields)) for table in tables])
    order = np.lexsort((edges.right, edges.left))
    left, right = edges.left[order], edges.right[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (left[1:] != left[:-1]) | (right[1:] != right[:-1])
    compared = int(new.sum())
    return {
        "candidates": candidates - (len(new) - compared),
        "compared": compared,
        "jaccard": histogram(edges.jaccard[order][new]),
    }


def histogram(jaccard: Similarities) -> dict[str, int]:
    """Pairs by twentieths of their similarity: `0.70` counts those from 0.70 to below 0.75."""
    counts = Counter((np.minimum(jaccard, 0.9999) * 20 + 1e-9).astype(int).tolist())
    return {f"{place / 20:.2f}": counts[place] for place in sorted(counts)}
