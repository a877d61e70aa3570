"""Decide which candidates are near-duplicates, by the exact Jaccard similarity of their sets of n-grams.

    J(A, B) = |A and B| / |A or B|

Only close candidates are compared: pairs whose sketches (MinHash values) have enough equal values. The sets of n-grams
are read from the files of the stage `ngrams`, some megabytes at a time. No text is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.config.corpora import DuplicatesConfig
from crosscut.corpus.collection import NO_NUMBERS, Collection, Numbers, begins_run, runs_of
from crosscut.corpus.documents import read_table, write_table
from crosscut.corpus.duplicates.bands import choose_bands, least_equal
from crosscut.corpus.duplicates.candidates import CANDIDATES, PAIRS_SUFFIX, CandidatePairs, distinct
from crosscut.corpus.duplicates.gram_sets import GramSets, read_sets
from crosscut.corpus.duplicates.sketches import SketchSettings, read_lengths, read_sketches
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.words.ngrams import Hashes, Places

SIMILAR = "similar"
PAIRS_PER_TASK = 1024
CHARACTERS_AT_A_TIME = 8_000_000
"""Approximate number of characters of the documents that a task compares at a time. It limits the task's memory."""

EDGES = pa.schema([("left", pa.uint64()), ("right", pa.uint64()), ("jaccard", pa.float64())])
"""Columns of the files with compared pairs: the numbers of the two documents, ascending, and their Jaccard
similarity."""

REFUSED_SUFFIX = ".refused"
"""Suffix of the file with the pairs that a task compared and found not similar enough. It is an Arrow file, but files
with the suffix `.arrow` hold the near-duplicates."""

Similarities = npt.NDArray[np.float64]


Groups = tuple[tuple[Path, list[int]], ...]
"""References to large groups: each file with groups, and the rows of the groups in the file."""


class PairCheck(NamedTuple):
    """Definition of near-duplicates: the number of words per n-gram, and two thresholds."""

    ngram: int
    jaccard: float
    least_equal: int
    """Minimum number of equal MinHash values. The texts of a pair with fewer equal values are not compared."""


def search_settings(config: DuplicatesConfig) -> tuple[SketchSettings, PairCheck]:
    """Choose the settings of the sketches, and of the comparison of candidates."""
    settings = SketchSettings(config.ngram, *choose_bands(config.jaccard, config.recall))
    least = least_equal(settings.shape, config.jaccard, config.recall)
    return settings, PairCheck(config.ngram, config.jaccard, least)


class Edges(NamedTuple):
    """Pairs of document numbers with their exact Jaccard similarity."""

    left: Numbers
    right: Numbers
    jaccard: Similarities

    def at(self, chosen: npt.NDArray[np.bool_] | Places) -> Edges:
        """Select some pairs, by one boolean per pair or by indices."""
        return Edges(self.left[chosen], self.right[chosen], self.jaccard[chosen])


def check_pairs(
    collection: Collection, check: PairCheck, work: Path, bounds: tuple[int, int], name: str, output: Output
) -> Counts:
    """Run a task: find the near-duplicates among the candidate pairs. `work` is the run's work folder.

    The task checks the pairs whose left document number is at least `bounds[0]` and below `bounds[1]`.
    """
    found, passed = [], []
    for path in sorted((work / CANDIDATES).glob(f"*{PAIRS_SUFFIX}")):
        table = read_table(path)
        start, stop = np.searchsorted(table["left"].to_numpy(), np.array(bounds, np.uint64)).tolist()
        some = table.slice(start, stop - start)
        found.append(CandidatePairs(some["left"].to_numpy(), some["right"].to_numpy()))
        passed.append(found[-1].at(some["close"].to_numpy()))
    measured = measure(collection, work, distinct(passed))
    return _write(output.path(f"{name}.arrow"), [measured], check, candidates=len(distinct(found).left))


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


def check_groups(
    collection: Collection, check: PairCheck, work: Path, groups: Groups, name: str, output: Output
) -> Counts:
    """Run a task: find the near-duplicates in the given large groups of documents. `work` is the run's work folder."""
    measured: list[Edges] = []
    known: dict[int, Edges] = {}
    for path, rows in groups:
        members = read_table(path)["members"]
        for row in rows:
            measured += compare_group(collection, check, work, np.asarray(members[row].values.to_numpy()), known)
    return _write(output.path(f"{name}.arrow"), measured, check, candidates=sum(len(edges.left) for edges in measured))


def compare_group(
    collection: Collection, check: PairCheck, work: Path, members: Numbers, known: dict[int, Edges]
) -> Iterator[Edges]:
    """Compare the members of a group, but skip members that are already known to be duplicates.

    The members are in the order of `preference`. The first member is compared with all others, and its duplicates are
    removed from the list. Then the next remaining member is compared with the members after it, and so on. `known` maps
    a document number to the similarities that were measured in other groups; new similarities are added to `known`.
    """
    ordered = np.sort(members)
    sketches = read_sketches(collection, ordered)
    sets = read_sets(work, ordered) if sketches.lengths.sum() <= CHARACTERS_AT_A_TIME else None
    left = members
    while len(left) > 1:
        leader, left = left[0], left[1:]
        rest = left[~collection.is_earlier(left)] if collection.is_earlier(leader) else left
        before = known.get(int(leader))
        others = np.sort(rest if before is None else rest[~np.isin(rest, before.right)])
        equal = sketches.values[np.searchsorted(ordered, others)] == sketches.values[np.searchsorted(ordered, leader)]
        others = others[equal.sum(axis=1) >= check.least_equal]
        pairs = CandidatePairs(np.full(len(others), leader), others)
        edges = measure(collection, work, pairs) if sets is None else Edges(*pairs, jaccards(sets, pairs))
        yield edges
        both = concatenate([edges] if before is None else [before, edges])
        known[int(leader)] = both
        left = left[~np.isin(left, both.right[both.jaccard >= check.jaccard])]


def read_edges(files: Sequence[Path]) -> Edges:
    """Read the compared pairs from the files of several tasks."""
    return concatenate([Edges(*(table[name].to_numpy() for name in EDGES.names)) for table in map(read_table, files)])


def concatenate(edges: Sequence[Edges]) -> Edges:
    """Concatenate several sets of edges."""
    none = Edges(NO_NUMBERS, NO_NUMBERS, np.empty(0, np.float64))
    return Edges(*map(np.concatenate, zip(none, *edges, strict=True)))


def measure(collection: Collection, work: Path, pairs: CandidatePairs) -> Edges:
    """Measure the exact Jaccard similarity of pairs. The pairs must be ordered by their left number."""
    found = [np.empty(0, np.float64)]
    found += [jaccards(read_sets(work, numbers), some) for some, numbers in _portions(collection, pairs)]
    return Edges(*pairs, np.concatenate(found))


def _portions(collection: Collection, pairs: CandidatePairs) -> Iterator[tuple[CandidatePairs, Numbers]]:
    """Split pairs into portions of about `CHARACTERS_AT_A_TIME` characters. Each portion comes with the numbers of its
    documents.
    """
    if not len(pairs.left):
        return
    numbers = np.unique(np.concatenate(pairs))
    lengths = read_lengths(collection, numbers).astype(np.int64)
    left, right = (lengths[np.searchsorted(numbers, column)] for column in pairs)
    portion = np.cumsum(left + right) // CHARACTERS_AT_A_TIME
    for start, stop in runs_of(portion):
        some = CandidatePairs(*(column[start:stop] for column in pairs))
        yield some, np.unique(np.concatenate(some))


def jaccards(sets: GramSets, pairs: CandidatePairs) -> Similarities:
    """Compute the Jaccard similarity of each pair of documents. Pairs with the same left number must be adjacent."""
    left, right = (np.searchsorted(sets.numbers, column) for column in pairs)
    found = np.empty(len(left), np.float64)
    for start, stop in runs_of(left):
        found[start:stop] = similarities(sets.sets.of(left[start]), *sets.at(right[start:stop]))
    return found


def similarities(one: Hashes, others: Hashes, sizes: Places) -> Similarities:
    """Compute the Jaccard similarity of the set `one` of n-grams to several other sets.

    `others` is the concatenation of the other sets, and `sizes` has the number of n-grams in each of them. Every set
    must be ascending, without repetitions, and not empty.
    """
    places = np.searchsorted(one, others)
    places[places == len(one)] = 0
    common = np.add.reduceat((one[places] == others).astype(np.int64), np.cumsum(sizes) - sizes)
    return np.asarray(common / (len(one) + sizes - common))


def _write(path: Path, measured: Sequence[Edges], check: PairCheck, *, candidates: int) -> Counts:
    edges = concatenate(measured)
    left, right = np.minimum(edges.left, edges.right), np.maximum(edges.left, edges.right)
    edges = Edges(left, right, edges.jaccard).at(np.lexsort((right, left)))
    similar = edges.jaccard >= check.jaccard
    for file, chosen in ((path, similar), (path.with_suffix(REFUSED_SUFFIX), ~similar)):
        write_table(file, edges.at(chosen)._asdict(), EDGES)
    return {"candidates": candidates, "compared": len(edges.left), "similar": int(similar.sum())}


def count_pairs(files: Sequence[Path], *, candidates: int) -> Counts:
    """Count the compared pairs in the files of all tasks. Each pair counts once, even if several tasks compared it.

    `candidates` is the number of candidate pairs, summed over the tasks. It counts a pair several times if several
    tasks compared the pair. The result gives the number of distinct candidate pairs.
    """
    edges = read_edges(files)
    edges = edges.at(np.lexsort((edges.right, edges.left)))
    new = begins_run(edges.left, edges.right)
    compared = int(new.sum())
    return {
        "candidates": candidates - (len(new) - compared),
        "compared": compared,
        "jaccard": histogram(edges.jaccard[new]),
    }


def histogram(jaccard: Similarities) -> dict[str, int]:
    """Count pairs by similarity in steps of 0.05: the key `0.70` counts the pairs from 0.70 to below 0.75."""
    counts = Counter((np.minimum(jaccard, 0.9999) * 20 + 1e-9).astype(int).tolist())
    return {f"{place / 20:.2f}": counts[place] for place in sorted(counts)}
