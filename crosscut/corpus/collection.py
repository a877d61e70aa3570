"""Assign numbers to the documents of several parts (Arrow files of documents), so that an 8-byte integer locates a
document.

The parts of earlier runs come first, then the parts of this run. A document's number is the index of its part times
2**32, plus its row. Numbers therefore ascend in the order of the corpus.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError
from crosscut.corpus.documents import INGEST, Lineage, Part, Rows, read_columns
from crosscut.corpus.execution.stages import read_records
from crosscut.corpus.finished import LOCK_FILE, WORK_FOLDER, read_finished
from crosscut.corpus.parts import find_parts

Numbers = npt.NDArray[np.uint64]

NO_NUMBERS: Numbers = np.empty(0, np.uint64)

_ROW_BITS = np.uint64(32)
_ROW_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Collection:
    """The parts (Arrow files of documents) of earlier runs and of this run, in the order of their documents' numbers.

    Instances can be pickled.
    """

    parts: tuple[Part, ...]
    earlier: tuple[str, ...] = ()
    """For each part of an earlier run, the output folder of that run as spelled in `duplicates.against`. `parts` begins
    with the parts of earlier runs, in the same order."""

    @property
    def num_earlier(self) -> int:
        """Number of parts that belong to earlier runs."""
        return len(self.earlier)

    @property
    def own(self) -> tuple[Part, ...]:
        """The parts of this run."""
        return self.parts[self.num_earlier :]

    def numbers(self, index: int, rows: Rows) -> Numbers:
        """Return the document numbers of the given rows in the part `parts[index]`."""
        return first_number(index) + rows.astype(np.uint64)

    def is_earlier(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return one boolean per document number: whether the document belongs to an earlier run."""
        return numbers < first_number(self.num_earlier)

    def earlier_digests(self) -> list[str]:
        """Compute one hash for each earlier run. The hash covers the name of the run's folder and the hashes of all
        files that the run wrote.

        A task whose result depends on earlier runs puts these hashes into its settings, because the files of earlier
        runs are not among the task's inputs.
        """
        return [_digest(folder) for folder in dict.fromkeys(self.earlier)]

    def ids(self, numbers: Numbers) -> list[str]:
        """Look up the ids of documents by their numbers, which may be in any order and may repeat. No text is read.

        The id of a document of an earlier run begins with the folder of that run (see `earlier_id`).
        """
        distinct, places = np.unique(numbers, return_inverse=True)
        ids: list[str] = []
        for index, rows in split_by_part(distinct):
            part = self.parts[index]
            column = read_columns(part.file(INGEST), "id")["id"].take(rows).to_pylist()
            is_own = index >= self.num_earlier
            ids += column if is_own else [earlier_id(self.earlier[index], name) for name in column]
        return [ids[place] for place in places.tolist()]


def earlier_id(folder: str, document_id: str) -> str:
    """Id under which this run refers to a document of an earlier run: `[FOLDER] source/file#record`.

    No document of this run has such an id, because the names of sources contain no brackets.
    """
    return f"[{folder}] {document_id}"


def first_number(index: int) -> np.uint64:
    """Document number of row 0 in the part at `index`."""
    return np.uint64(index) << _ROW_BITS


def begins_run(*columns: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return one boolean per row of ordered columns: whether the row differs from the row before it."""
    begins = np.ones(len(columns[0]), dtype=bool)
    begins[1:] = reduce(np.logical_or, (column[1:] != column[:-1] for column in columns))
    return begins


def runs_of(column: npt.NDArray[np.generic]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of equal values."""
    return pairwise([*np.flatnonzero(begins_run(column)).tolist(), len(column)])


def split_by_part(numbers: Numbers) -> Iterator[tuple[int, Rows]]:
    """Split ascending document numbers by part. Yields the index of each part and the rows of its documents."""
    parts = (numbers >> _ROW_BITS).astype(np.int64)
    rows = (numbers & _ROW_MASK).astype(np.uint32)
    for start, stop in runs_of(parts):
        yield int(parts[start]), rows[start:stop]


def collect(work: Path, earlier: tuple[str, ...], lineage: Lineage) -> Collection:
    """Collect the documents that earlier runs kept and the documents of this run that have the given lineage.

    `earlier` lists the output folders of the earlier runs. Raises `DataError` if an earlier run has not finished.
    """
    before = [(folder, part) for folder in earlier for part in _kept_parts(folder)]
    own = [part for part, _ in find_parts(work, lineage)]
    return Collection((*(part for _, part in before), *own), tuple(folder for folder, _ in before))


def require_finished_run(folder: str) -> Lineage:
    """Read the lineage of the finished run in an output folder. Raises `DataError` if there is no such file."""
    finished = read_finished(Path(folder) / WORK_FOLDER)
    if finished is None:
        raise DataError(
            f"`duplicates.against` must name output folders of finished runs of `crosscut prepare`, but `{folder}` "
            f"holds no finished run. Its folder `{WORK_FOLDER}` may be missing, or the run may be interrupted or still "
            f"running. Finish the run first, or remove `{folder}` from `duplicates.against`."
        )
    return finished


@contextmanager
def reading(earlier: tuple[str, ...]) -> Iterator[None]:
    """Hold shared locks on the output folders of earlier runs, so that no process changes the folders while this run
    reads them.

    Other runs may read the folders at the same time. A folder whose lock file is missing or not readable is used
    without a lock. Raises `DataError` if a process is preparing one of the folders.
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
                    f"`duplicates.against` must name finished runs, but another process is preparing `{folder}`. Wait "
                    f"until that process has ended, or remove `{folder}` from `duplicates.against`."
                ) from None
        yield


def _kept_parts(folder: str) -> list[Part]:
    return [part for part, _ in find_parts(Path(folder) / WORK_FOLDER, require_finished_run(folder))]


def _digest(folder: str) -> str:
    work = Path(folder) / WORK_FOLDER
    stages = sorted(path.name for path in work.iterdir() if path.is_dir())
    files = [record.files for stage in stages for record in read_records(work, stage)]
    content = [folder, asdict(require_finished_run(folder)), files]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
