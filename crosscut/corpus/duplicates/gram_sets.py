"""Store the set of n-grams of each document that is compared, so that its text is read and hashed only once.

A page made from a template occurs in many candidate pairs. The stage `ngrams` writes one file for each part (an Arrow
file of documents). The file has a sorted array of distinct 64-bit hashes for each document that the stage `candidates`
wants to compare. The stage `similar` then works on these arrays and reads no text. An n-gram takes 8 bytes on the disk.

The hashes decide whether two n-grams are equal. If two documents have N distinct n-grams in total, the probability that
any two of these n-grams have the same hash is below N**2 / 2**65. For two documents of 10,000 n-grams each, this is 1
in 10**11.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from crosscut.corpus.collection import NO_NUMBERS, Collection, Numbers, first_number, split_by_part
from crosscut.corpus.documents import read_table, write_table
from crosscut.corpus.duplicates.candidates import CANDIDATES, MEMBERS_SUFFIX
from crosscut.corpus.duplicates.sketches import hash_ngrams
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.occurrences import rows_of_part
from crosscut.corpus.words.ngrams import Hashed, Hashes, Places

NGRAMS = "ngrams"

SETS = pa.schema([("row", pa.uint32()), ("ngrams", pa.large_list(pa.uint64()))])
"""Columns of the file with a part's sets of n-grams: the row of the document in the part, ascending, and the hashes of
the document's distinct n-grams, ascending."""


def sets_name(index: int) -> str:
    """Name of the file with the sets of n-grams of the part at `index`, without the suffix.

    Parts of several runs may have the same name, so the file is named after the index of the part in the collection.
    """
    return f"{index:06}"


def write_sets(collection: Collection, work: Path, ngram: int, index: int, output: Output) -> Counts:
    """Run a task: write the sets of n-grams of all documents in the part at `index` that will be compared."""
    rows = (_members(work / CANDIDATES, index) - first_number(index)).astype(np.uint32)
    texts = collection.parts[index].texts(rows) if len(rows) else []
    sets = list(map(as_sets, hash_ngrams(texts, ngram)))
    hashes = np.concatenate([np.empty(0, np.uint64), *(some.hashes for some in sets)])
    sizes = np.concatenate([np.zeros(1, np.int64), *(np.diff(some.starts) for some in sets)])
    lists = pa.LargeListArray.from_arrays(pa.array(np.cumsum(sizes)), pa.array(hashes))
    write_table(output.path(f"{sets_name(index)}.arrow"), {"row": rows, "ngrams": lists}, SETS)
    return {"documents": len(rows), "ngrams": len(hashes)}


def _members(folder: Path, index: int) -> Numbers:
    """Read the numbers of all documents in the part at `index` that will be compared, ascending."""
    files = sorted(folder.glob(f"*{MEMBERS_SUFFIX}"))
    found = [rows_of_part(read_table(path), index)["number"].to_numpy() for path in files]
    return np.unique(np.concatenate([NO_NUMBERS, *found]))


def as_sets(grams: Hashed) -> Hashed:
    """Sort the n-grams of each document and remove repetitions.

    For a few thousand n-grams, sorting is much faster than the hash table of `np.unique`.
    """
    hashes = grams.hashes.copy()
    for place in range(len(grams.starts) - 1):
        hashes[grams.starts[place] : grams.starts[place + 1]].sort()
    new = np.ones(len(hashes), dtype=bool)
    np.not_equal(hashes[1:], hashes[:-1], out=new[1:])
    firsts = grams.starts[:-1]
    new[firsts[firsts < len(hashes)]] = True  # the last n-gram of one document may be the first of the next
    sizes = np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])[grams.starts])
    return Hashed(hashes[new], np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


class GramSets(NamedTuple):
    """Sets of n-grams of several documents."""

    numbers: Numbers
    """Numbers of the documents, ascending."""

    sets: Hashed
    """Hashes of the distinct n-grams of each document, ascending."""

    def at(self, places: Places) -> tuple[Hashes, Places]:
        """Concatenate the sets of the documents with the given indices. Returns the hashes and the size of each set."""
        starts, hashes = self.sets.starts, self.sets.hashes
        firsts, behind = starts[places], starts[places + 1]
        bounds = zip(firsts.tolist(), behind.tolist(), strict=True)
        return np.concatenate([hashes[start:stop] for start, stop in bounds]), behind - firsts


def read_sets(work: Path, numbers: Numbers) -> GramSets:
    """Read the sets of n-grams of documents into memory. The document numbers must be ascending."""
    hashes = [np.empty(0, np.uint64)]
    sizes = [np.zeros(1, np.int64)]
    for index, rows in split_by_part(numbers):
        table = read_table(work / NGRAMS / f"{sets_name(index)}.arrow")
        column = table["ngrams"].chunk(0)
        starts, grams = column.offsets.to_numpy(), column.values.to_numpy()
        places = np.searchsorted(table["row"].to_numpy(), rows)
        first, behind = starts[places], starts[places + 1]
        # The copy lets go of the mapped file, so that only one file is open at a time.
        hashes.append(
            np.concatenate([grams[start:stop] for start, stop in zip(first.tolist(), behind.tolist(), strict=True)])
        )
        sizes.append(behind - first)
    return GramSets(numbers, Hashed(np.concatenate(hashes), np.cumsum(np.concatenate(sizes))))
