"""Documents of many parts, each known by a number: those of earlier runs' parts first, then those of this one.

A number is that of the part times 2**32 plus the row, so that numbers ascend in the order of the corpus, and a table of
them says in eight bytes where a document is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError
from crosscut.corpus.documents import INGEST, Document, Part, Rows, drops_name
from crosscut.corpus.parts import find_parts
from crosscut.corpus.stages import read_records

Numbers = npt.NDArray[np.uint64]

_ROW_BITS = np.uint64(32)
_ROW_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Collection:
    """Parts in the order of their documents' numbers. Pickles."""

    parts: tuple[Part, ...]
    num_earlier: int = 0
    """How many of them, the first ones, are of earlier runs."""

    @property
    def own(self) -> tuple[Part, ...]:
        """Those of this run."""
        return self.parts[self.num_earlier :]

    def numbers(self, index: int, rows: Rows) -> Numbers:
        """Numbers of rows of the part at `index`."""
        return first_number(index) + rows.astype(np.uint64)

    def is_earlier(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Which documents are of earlier runs."""
        return numbers < first_number(self.num_earlier)

    def earlier_digests(self) -> list[str]:
        """A hash of all that each earlier run wrote: what depends on it does so by no file of this run."""
        works = dict.fromkeys(part.work for part in self.parts[: self.num_earlier])
        return [_digest(work) for work in works]

    def ids(self, numbers: Numbers) -> list[str]:
        """The ids of documents, in any order and as often as they are asked for."""
        distinct, places = np.unique(numbers, return_inverse=True)
        ids = [document.id for document in self.documents(distinct)]
        return [ids[place] for place in places.tolist()]

    def documents(self, numbers: Numbers) -> Iterator[Document]:
        """The documents of ascending numbers; a part at a time is open."""
        for index, rows in split_by_part(numbers):
            yield from self.parts[index].select(rows)


def first_number(index: int) -> np.uint64:
    """The number of the first row of the part at `index`."""
    return np.uint64(index) << _ROW_BITS


def split_by_part(numbers: Numbers) -> Iterator[tuple[int, Rows]]:
    """Ascending numbers as the index of each part and its rows."""
    parts = (numbers >> _ROW_BITS).astype(np.int64)
    rows = (numbers & _ROW_MASK).astype(np.uint32)
    starts = np.flatnonzero(np.diff(parts, prepend=-1))
    for start, stop in pairwise([*starts.tolist(), len(parts)]):
        yield int(parts[start]), rows[start:stop]


def collect(work: Path, earlier: tuple[str, ...], *, filters: tuple[str, ...], cleaned: bool) -> Collection:
    """The parts of this run as some filters left them, behind what the earlier runs with these output folders kept.

    Raises `DataError` for a folder that is none, or whose stages are gone.
    """
    before = tuple(part for folder in earlier for part in _kept_parts(folder))
    own = tuple(part for part, _ in find_parts(work, filters=filters, cleaned=cleaned))
    return Collection((*before, *own), len(before))


def _kept_parts(folder: str) -> list[Part]:
    work = Path(folder) / "work"
    if not (work / INGEST).is_dir():
        raise DataError(
            f"`duplicates.against` must name output folders of `crosscut prepare` with their `work` in them, but "
            f"`{work}` holds no documents. Name the folder of an earlier run, or run it again."
        )
    cleaned = any((work / "cleaning").glob("*.arrow"))
    return [Part(work, part.name, _filters_of(work, part.name), cleaned) for part, _ in find_parts(work)]


def _digest(work: Path) -> str:
    stages = sorted(path.name for path in work.iterdir() if path.is_dir())
    files = [record.files for stage in stages for record in read_records(work, stage)]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _filters_of(work: Path, part: str) -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in work.glob(f"*/{drops_name(part)}")))
