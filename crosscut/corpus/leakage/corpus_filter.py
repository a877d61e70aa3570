"""Bloom filter of the corpus's n-grams, asked for the n-grams of the test sets: the overlap as the paper measures it
(section 4.1.2).

The paper's filter holds the 8-grams of the training set, and its false-positive rate is 1e-3. An n-gram of a test set
counts as found if the filter lets it through, so the result is an upper bound ("at most 10.8%").

A filter with k hash functions has k rows of slots. Function i sends an n-gram to one slot of row i, adding an n-gram
sets its k slots, and the filter lets an n-gram through if all of its k slots are set. A whole filter takes 1.8 bytes
for each n-gram of the corpus. Only the slots that n-grams of the test sets have are kept here, because no others are
looked up. The answers are the same, and memory does not grow with the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.corpus.documents import Part
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.leakage.grams import GRAMS_NAME, Numbers, open_grams
from crosscut.corpus.leakage.passages import each_gram
from crosscut.corpus.words.hashes import FACTOR, HALF
from crosscut.corpus.words.ngrams import Hashes

CORPUS_FILTER = "corpus-filter"
"""Name of the stage that fills the filter."""

MARKS_SUFFIX = ".marks.npy"
"""Suffix of the file with the slots that a part sets: one bit per kept slot, row after row."""

_TABLE_BITS = np.uint64((1 << 22) - 1)
"""Mask for the low bits of slots. A table of these bits tells quickly that a slot is not kept."""

Marks = npt.NDArray[np.bool_]


class FilterSize(NamedTuple):
    """Size of a Bloom filter."""

    capacity: int
    """Number of n-grams that the filter can hold at its false-positive rate. Repeated n-grams of the corpus count
    again, so the true rate is a little lower."""

    false_positives: float

    @property
    def num_rows(self) -> int:
        """Number of hash functions."""
        return math.ceil(math.log2(1 / self.false_positives))

    @property
    def num_slots(self) -> int:
        """Number of slots in each row. `capacity` distinct n-grams set a share p**(1/k) of them, for the rate p."""
        share = self.false_positives ** (1 / self.num_rows)
        return math.ceil(max(self.capacity, 1) / -math.log1p(-share))

    def slots(self, hashes: Hashes, row: int) -> Hashes:
        """Slot of each n-gram in a row. Two hashes give those of all rows (Kirsch and Mitzenmacher 2006)."""
        step = (hashes ^ hashes >> HALF) * FACTOR
        step ^= step >> HALF
        return (hashes + np.uint64(row) * step) % np.uint64(self.num_slots)


class _Row:
    """The slots of one row that the n-grams of the test sets ask for."""

    def __init__(self, slots: Hashes) -> None:
        self.slots, self.of_gram = np.unique(slots, return_inverse=True)
        self._table = np.zeros(int(_TABLE_BITS) + 1, dtype=np.bool_)
        self._table[self.slots & _TABLE_BITS] = True

    def find(self, slots: Hashes) -> Numbers:
        """Indices of the kept slots among some slots."""
        slots = slots[self._table[slots & _TABLE_BITS]]
        places = np.searchsorted(self.slots, slots)
        inside = places < len(self.slots)
        places, slots = places[inside], slots[inside]
        found: Numbers = places[self.slots[places] == slots]
        return found


@lru_cache(maxsize=1)
def _rows(folder: Path, n: int, size: FilterSize, _modified: int) -> list[_Row]:
    hashes = open_grams(folder, n).hashes
    return [_Row(size.slots(hashes, row)) for row in range(size.num_rows)]


def _open_rows(folder: Path, n: int, size: FilterSize) -> list[_Row]:
    return _rows(folder, n, size, (folder / GRAMS_NAME).stat().st_mtime_ns)


def fill(part: Part, folder: Path, n: int, size: FilterSize, output: Output) -> Counts:
    """Run a task: add the n-grams of a part's documents to the filter, and write the slots that they set.

    `folder` holds the n-grams of the test sets.
    """
    rows = _open_rows(folder, n, size)
    marks = [np.zeros(len(row.slots), dtype=np.bool_) for row in rows]
    added = 0
    for hashes in each_gram(part.texts(part.rows()), n):
        added += len(hashes)
        for number, (row, marked) in enumerate(zip(rows, marks, strict=True)):
            marked[row.find(size.slots(hashes, number))] = True
    np.save(output.path(f"{part.name}{MARKS_SUFFIX}"), np.packbits(np.concatenate(marks)))
    return {"grams": added}


def let_through(folder: Path, n: int, size: FilterSize, files: Sequence[Path]) -> Marks:
    """Whether the filter lets each n-gram of the test sets through, [grams]. `files` have the slots that each part
    sets.
    """
    rows = _open_rows(folder, n, size)
    bounds = np.cumsum([0, *(len(row.slots) for row in rows)])
    bits = np.zeros(-(-int(bounds[-1]) // 8), dtype=np.uint8)
    for file in files:
        bits |= np.load(file)
    marks = np.unpackbits(bits).astype(np.bool_)
    through = np.ones(len(rows[0].of_gram), dtype=np.bool_)
    for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
        through &= marks[start:end][row.of_gram]
    return through
