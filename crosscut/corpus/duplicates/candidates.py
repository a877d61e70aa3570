"""Find candidates for near-duplicates: documents whose sketches (MinHash values) have an equal band.

If up to `GROUP_LIMIT` documents have an equal band, all their pairs are written. A larger group of documents is written
as a list, because the number of pairs grows with the square of the group size: ten thousand pages of one template would
make fifty million pairs. The list is in the order of `preference`: of two duplicates, the first one is kept. The module
`similarity` compares each document only with earlier documents of the list that are not duplicates themselves. A pair
is skipped only if one of its documents is already known to be a duplicate of a document earlier in the list. The
duplicate is dropped in any case. Of any two similar documents in the group, at least one is therefore dropped.

Candidate pairs whose sketches have too few equal values are marked as not close, and their texts are never compared;
`least_equal` in the module `bands` bounds the share of near-duplicates that this step loses. The numbers of the
documents that may be compared are written too, so that the module `gram_sets` can prepare these documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.corpus.collection import NO_NUMBERS, Collection, Numbers, begins_run
from crosscut.corpus.documents import write_table
from crosscut.corpus.duplicates.sketches import Sketches, Values, read_band, read_sketches
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.words.hashes import FACTOR, GOLDEN_FACTOR, HALF
from crosscut.corpus.words.ngrams import Hashes, Places

CANDIDATES = "candidates"
GROUP_LIMIT = 32
"""Maximum number of documents in a group that is written as pairs."""

DOCUMENTS_PER_TASK = 500_000
"""Approximate number of documents that a task sorts. A document counts once for each band of the task."""

PAIRS_AT_A_TIME = 8192
"""Number of pairs whose sketches are in memory at a time."""

PAIRS = pa.schema([("left", pa.uint64()), ("right", pa.uint64()), ("close", pa.bool_())])
"""Columns of the file with candidate pairs: two document numbers, the smaller one as `left`, and whether enough of the
documents' MinHash values are equal. Pairs are distinct and ascending."""

GROUPS = pa.schema([("members", pa.large_list(pa.uint64()))])
"""Column of the file with groups of more than `GROUP_LIMIT` documents. The members are document numbers in the order of
`preference`."""

MEMBERS = pa.schema([("number", pa.uint64())])
"""Column of the file with the documents of close pairs and of large groups: document numbers, distinct and
ascending."""

PAIRS_SUFFIX, GROUPS_SUFFIX, MEMBERS_SUFFIX = ".pairs.arrow", ".groups.arrow", ".members.arrow"
"""Suffixes of a task's files with the columns `PAIRS`, `GROUPS` and `MEMBERS`."""


class CandidatePairs(NamedTuple):
    """Pairs of document numbers, in ascending order. The left number of a pair is less than the right number."""

    left: Numbers
    right: Numbers

    def at(self, chosen: npt.NDArray[np.bool_]) -> CandidatePairs:
        """Select some pairs. `chosen` has one boolean per pair."""
        return CandidatePairs(self.left[chosen], self.right[chosen])


class BandShare(NamedTuple):
    """One task's share of the search for documents with an equal band.

    A key is the hash of a document's values in a band (see `band_keys`). Several tasks divide the keys of the bands
    `bands` among themselves. Their number is `of`. The task with index `which` gets the keys whose remainder modulo
    `of` is `which`.
    """

    bands: tuple[int, ...]
    which: int
    of: int


def shares(num_documents: int, num_bands: int) -> list[BandShare]:
    """Divide the search into shares of about `DOCUMENTS_PER_TASK` documents."""
    count = max(1, -(-num_documents // DOCUMENTS_PER_TASK))
    width = max(1, min(num_bands, DOCUMENTS_PER_TASK // max(1, num_documents)))
    bands = [tuple(range(start, min(start + width, num_bands))) for start in range(0, num_bands, width)]
    return [BandShare(some, which, count) for some in bands for which in range(count)]


def find_candidates(collection: Collection, share: BandShare, least_equal: int, name: str, output: Output) -> Counts:
    """Run a task: find the candidate pairs and the large groups in one share of the search.

    A pair is close if at least `least_equal` MinHash values of its documents are equal. `name` is the name of the task.
    The written files are named after the task.
    """
    pairs: list[CandidatePairs] = []
    groups: list[Numbers] = []
    for band in share.bands:
        sketches = _sketches_of(collection, band, share)
        for members, size in group(band_keys(sketches.values), sketches.numbers):
            if size <= GROUP_LIMIT:
                pairs.append(all_pairs(members.reshape(-1, size)))
            elif not collection.is_earlier(members).all():
                groups.append(by_preference(collection, sketches, members))
        pairs = [distinct(pairs)]
    found = without_earlier(collection, distinct(pairs))
    close = are_close(collection, found, least_equal)
    write_table(output.path(f"{name}{PAIRS_SUFFIX}"), {**found._asdict(), "close": close}, PAIRS)
    write_table(output.path(f"{name}{GROUPS_SUFFIX}"), {"members": groups}, GROUPS)
    members = np.unique(np.concatenate([*found.at(close), *groups]))
    write_table(output.path(f"{name}{MEMBERS_SUFFIX}"), {"number": members}, MEMBERS)
    return {"pairs": len(found.left), "groups": len(groups)}


def are_close(collection: Collection, pairs: CandidatePairs, least_equal: int) -> npt.NDArray[np.bool_]:
    """Whether at least `least_equal` MinHash values of each pair are equal."""
    close = np.empty(len(pairs.left), np.bool_)
    for start in range(0, len(close), PAIRS_AT_A_TIME):
        some = CandidatePairs(*(column[start : start + PAIRS_AT_A_TIME] for column in pairs))
        sketches = read_sketches(collection, np.unique(np.concatenate(some)))
        close[start : start + PAIRS_AT_A_TIME] = equal_values(sketches, some) >= least_equal
    return close


def equal_values(sketches: Sketches, pairs: CandidatePairs) -> Places:
    """Number of equal MinHash values in each pair."""
    left, right = (np.searchsorted(sketches.numbers, column) for column in pairs)
    return np.asarray((sketches.values[left] == sketches.values[right]).sum(axis=1))


def _sketches_of(collection: Collection, band: int, share: BandShare) -> Sketches:
    read = []
    for index in range(len(collection.parts)):
        sketches = read_band(collection, index, band)
        mine = band_keys(sketches.values) % np.uint64(share.of) == share.which
        read.append(sketches.at(mine))
    return Sketches(*(np.concatenate(columns) for columns in zip(*read, strict=True)))


def band_keys(values: Values) -> Hashes:
    """Hash each row of MinHash values [documents, rows] to one key [documents]."""
    keys = np.zeros(len(values), np.uint64)
    for column in values.T:
        keys ^= column
        keys *= GOLDEN_FACTOR
        keys ^= keys >> HALF
    return keys * FACTOR


def group(keys: Hashes, numbers: Numbers) -> Iterator[tuple[Numbers, int]]:
    """Group documents with equal keys. Yields arrays of document numbers, each together with a group size.

    An array holds either one group of more than `GROUP_LIMIT` documents, or all smaller groups of one size, one after
    the other.
    """
    order = np.argsort(keys, kind="stable")
    keys, numbers = keys[order], numbers[order]
    starts = np.flatnonzero(begins_run(keys))
    sizes = np.diff(starts, append=len(keys))
    for size in np.unique(sizes[(sizes > 1) & (sizes <= GROUP_LIMIT)]).tolist():
        places = starts[sizes == size][:, None] + np.arange(size)
        yield numbers[places].ravel(), size
    for start, size in zip(starts[sizes > GROUP_LIMIT].tolist(), sizes[sizes > GROUP_LIMIT].tolist(), strict=True):
        yield numbers[start : start + size], size


def all_pairs(groups: npt.NDArray[np.uint64]) -> CandidatePairs:
    """Make all pairs within each row of `groups` [groups, size]. The numbers in a row are ascending."""
    left, right = _triangle(groups.shape[1])
    return CandidatePairs(groups[:, left].ravel(), groups[:, right].ravel())


@lru_cache(maxsize=GROUP_LIMIT)
def _triangle(size: int) -> tuple[Places, Places]:
    left, right = np.triu_indices(size, 1)
    return left, right


def by_preference(collection: Collection, sketches: Sketches, members: Numbers) -> Numbers:
    """Sort the members of a group by `preference`."""
    lengths = sketches.lengths[np.searchsorted(sketches.numbers, members)]
    return members[preference(collection.is_earlier(members), lengths, members)]


def preference(is_earlier: npt.NDArray[np.bool_], lengths: npt.NDArray[np.uint64], numbers: Numbers) -> Places:
    """Order documents by preference: documents of earlier runs first, then longer documents, then lower numbers.

    Returns the indices of the documents in this order. If two documents are duplicates, the first document in this
    order is kept.
    """
    return np.lexsort((numbers, -lengths.astype(np.int64), ~is_earlier))


def distinct(pairs: Sequence[CandidatePairs]) -> CandidatePairs:
    """Merge several sets of pairs into distinct, ascending pairs."""
    left, right = map(np.concatenate, zip((NO_NUMBERS, NO_NUMBERS), *pairs, strict=True))
    order = np.lexsort((right, left))
    pairs_in_order = CandidatePairs(left[order], right[order])
    return pairs_in_order.at(begins_run(*pairs_in_order))


def without_earlier(collection: Collection, pairs: CandidatePairs) -> CandidatePairs:
    """Keep only the pairs in which at least one document belongs to this run."""
    new = ~collection.is_earlier(pairs.right)  # earlier runs have the smaller numbers
    return pairs.at(new)
