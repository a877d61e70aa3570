"""Documents of many parts, each known by a number: those of earlier runs' parts first, then those of this one.

A number is that of the part times 2**32 plus the row, so that numbers ascend in the order of the corpus, and a table of
them says in eight bytes where a document is read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError
from crosscut.corpus.documents import INGEST, Document, Part, Rows, read_columns
from crosscut.corpus.execution.stages import read_records
from crosscut.corpus.finished import LOCK_FILE, WORK_FOLDER, FinishedRun
from crosscut.corpus.parts import find_parts

Numbers = npt.NDArray[np.uint64]

_ROW_BITS = np.uint64(32)
_ROW_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Collection:
    """Parts in the order of their documents' numbers. Pickles."""

    parts: tuple[Part, ...]
    earlier: tuple[str, ...] = ()
    """For each part of an earlier run, which come first, that run's folder as `duplicates.against` has it."""

    @property
    def num_earlier(self) -> int:
        """How many of the parts, the first ones, are of earlier runs."""
        return len(self.earlier)

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
        """A hash of each earlier run's name and of all that it wrote: what depends on these does so by no file of this
        run. Reads all records of the earlier runs.
        """
        return [_digest(folder) for folder in dict.fromkeys(self.earlier)]

    def ids(self, numbers: Numbers) -> list[str]:
        """The ids of documents, in any order and as often as they are asked for; texts are not read.

        Those of earlier runs stand behind their run, see `earlier_id`.
        """
        distinct, places = np.unique(numbers, return_inverse=True)
        ids: list[str] = []
        for index, rows in split_by_part(distinct):
            part = self.parts[index]
            column = read_columns(part.work / INGEST / f"{part.name}.arrow", "id")["id"].take(rows).to_pylist()
            is_own = index >= self.num_earlier
            ids += column if is_own else [earlier_id(self.earlier[index], name) for name in column]
        return [ids[place] for place in places.tolist()]

    def documents(self, numbers: Numbers) -> Iterator[Document]:
        """The documents of ascending numbers; a part at a time is open."""
        for index, rows in split_by_part(numbers):
            yield from self.parts[index].select(rows)


def earlier_id(folder: str, document_id: str) -> str:
    """How a document of an earlier run is called here: `[FOLDER] source/file#record`.

    No document of this run is called so, as the names of sources have no brackets.
    """
    return f"[{folder}] {document_id}"


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

    Raises `DataError` for a folder whose run has not ended well.
    """
    before = [(folder, part) for folder in earlier for part in _kept_parts(folder)]
    own = [part for part, _ in find_parts(work, filters=filters, cleaned=cleaned)]
    return Collection((*(part for _, part in before), *own), tuple(folder for folder, _ in before))


def require_finished_run(folder: str) -> FinishedRun:
    """The stages of the earlier run with this output folder. Raises `DataError` where it has not ended well."""
    line = FinishedRun.read(Path(folder) / WORK_FOLDER)
    if line is None:
        raise DataError(
            f"`duplicates.against` must name output folders of `crosscut prepare` whose run has ended well, with their "
            f"`{WORK_FOLDER}` in them, but `{folder}` has none: it is not there, broke off or is running. Finish it "
            f"first, or take it out."
        )
    return line


@contextmanager
def reading(earlier: tuple[str, ...]) -> Iterator[None]:
    """Keep the earlier runs with these output folders from being started again while this one reads them.

    Others may read them, too; a folder whose lock is gone or closed to this user is read without. Raises `DataError`
    where such a run is at work.
    """
    with ExitStack() as locks:
        for folder in earlier:
            try:
                lock = locks.enter_context((Path(folder) / LOCK_FILE).open())
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"`duplicates.against` must name runs that have ended, but `{folder}` is being prepared. Wait for "
                    f"it, or take it out."
                ) from None
        yield


def _kept_parts(folder: str) -> list[Part]:
    line = require_finished_run(folder)
    found = find_parts(Path(folder) / WORK_FOLDER, filters=line.filters, cleaned=line.cleaned)
    return [part for part, _ in found]


def _digest(folder: str) -> str:
    work = Path(folder) / WORK_FOLDER
    stages = sorted(path.name for path in work.iterdir() if path.is_dir())
    files = [record.files for stage in stages for record in read_records(work, stage)]
    content = [folder, asdict(require_finished_run(folder)), files]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
