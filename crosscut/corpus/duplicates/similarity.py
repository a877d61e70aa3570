"""Decide which candidates are near-duplicates, by the exact Jaccard similarity of their sets of n-grams.

    J(A, B) = |A and B| / |A or B|

First, pairs whose sketches (MinHash values) have too few equal values are removed; `least_equal` in the module `bands`
bounds the share of near-duplicates that this step loses. Then the texts of the remaining candidates are read and
compared, some megabytes at a time.
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
"""Approximate number of characters of the pairs that a task compares at a time. The number limits the task's memory.
"""

EDGES = pa.schema([("left", pa.uint64()), ("right", pa.uint64()), ("jaccard", pa.float64())])
"""Columns of the files with compared pairs: the numbers of the two documents, ascending, and their Jaccard
similarity."""

Similarities = npt.NDArray[np.float64]


Groups = tuple[tuple[Path, list[int]], ...]
"""References to large groups: each file with groups, and the rows of the groups in the file."""


class Check(NamedTuple):
    """Definition of near-duplicates: the number of words per n-gram, and two thresholds."""

    ngram: int
    jaccard: float
    least_equal: int
    """Minimum number of equal MinHash values. The texts of a pair with fewer equal values are not compared."""


class Edges(NamedTuple):
    """Pairs of document numbers with their exact Jaccard similarity."""

    left: Numbers
    right: Numbers
    jaccard: Similarities


def check_pairs(
    collection: Collection, check: Check, folder: Path, bounds: tuple[int, int], name: str, output: Output
) -> Counts:
    """Run a task: find the near-duplicates among the candidate pairs in `folder`.

    The task checks the pairs whose left document number is at least `bounds[0]` and below `bounds[1]`.
    """
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
    """Divide the large groups of documents in `files` among tasks of about `members_per_task` members each.

    Groups with the same first member go to the same task.
    """
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
    """Run a task: find the near-duplicates in the given large groups."""
    measured: list[Edges] = []
    known: dict[int, Edges] = {}
    for path, rows in groups:
        members = read_table(path)["members"]
        for row in rows:
            measured += compare_group(collection, check, np.asarray(members[row].values.to_numpy()), known)
    return _write(output.path(f"{name}.arrow"), measured, check, candidates=sum(len(edges.left) for edges in measured))


def compare_group(collection: Collection, check: Check, members: Numbers, known: dict[int, Edges]) -> Iterator[Edges]:
    """Compare the members of a group, but skip members that are already known to be duplicates.

    The members are in the order of `preference`. The first member is compared with all others, and its duplicates are
    removed from the list. Then the next remaining member is compared with the members after it, and so on. `known` maps
    a document number to the similarities that were measured in other groups; new similarities are added to `known`.
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
    """Concatenate several sets of edges."""
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
    """Number of equal MinHash values in each pair."""
    left, right = (np.searchsorted(sketches.numbers, column) for column in pairs)
    return np.asarray((sketches.values[left] == sketches.values[right]).sum(axis=1))


def measure(collection: Collection, pairs: Pairs, ngram: int) -> Edges:
    """Measure the exact Jaccard similarity of pairs. The pairs must be ordered by their left number."""
    found = [np.empty(0, np.float64)]
    for some, numbers in _portions(collection, pairs):
        grams = ngrams(hash_words(document.text for document in collection.documents(numbers)), ngram)
        found.append(jaccards(grams, *(np.searchsorted(numbers, column) for column in some)))
    return Edges(*pairs, np.concatenate(found))


def _portions(collection: Collection, pairs: Pairs) -> Iterator[tuple[Pairs, Numbers]]:
    """Split pairs into portions of about `CHARACTERS_AT_A_TIME` characters. Each portion comes with the numbers of its
    documents.
    """
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
    """Compute the Jaccard similarity of each pair of documents. `left` and `right` are document indices in `grams`.

    Pairs with the same left index must be adjacent.
    """
    sets = [as_set(grams.of(place)) for place in range(len(grams.starts) - 1)]
    found = np.empty(len(left), np.float64)
    starts = np.flatnonzero(np.diff(left, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(left)], strict=True):
        found[start:stop] = similarities(sets[left[start]], [sets[place] for place in right[start:stop]])
    return found


def as_set(grams: Hashes) -> Hashes:
    """Sort n-grams and remove repetitions.

    For a few thousand n-grams, sorting is much faster than the hash table of `np.unique`.
    """
    ordered = np.sort(grams)
    new = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


def similarities(one: Hashes, others: Sequence[Hashes]) -> Similarities:
    """Compute the Jaccard similarity of the set `one` of n-grams to each set in `others`.

    Each set must be ascending, without repetitions, and not empty.
    """
    sizes = np.fromiter(map(len, others), np.int64, len(others))
    grams = np.concatenate(others)
    places = np.searchsorted(one, grams)
    places[places == len(one)] = 0
    common = np.add.reduceat((one[places] == grams).astype(np.int64), np.cumsum(sizes) - sizes)
    return np.asarray(common / (len(one) + sizes - common))


def refused_name(task: str) -> str:
    """Name of the file with the pairs that a task compared and that are not similar enough.

    The file is an Arrow file, but its name does not end in `.arrow`, because files with that suffix hold the
    near-duplicates.
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
    """Count the compared pairs in the files of all tasks. Each pair counts once, even if several tasks compared it.

    `candidates` is the number of candidate pairs, summed over the tasks. It counts a pair several times if several
    tasks compared the pair. The result contains the number without repetitions.
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
    """Count pairs by similarity in steps of 0.05: the key `0.70` counts the pairs from 0.70 to below 0.75."""
    counts = Counter((np.minimum(jaccard, 0.9999) * 20 + 1e-9).astype(int).tolist())
    return {f"{place / 20:.2f}": counts[place] for place in sorted(counts)}
