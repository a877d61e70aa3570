"""Finding documents by their names, and their texts, without reading more of a corpus than its ids.

A document of the run itself is named by its id, one of an earlier run (`duplicates.against`) by that run and its id
there, as `Collection.ids` has it; the same id may be another document in each.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosscut.corpus.collection import earlier_id
from crosscut.corpus.documents import CLEANING, INGEST, read_columns, read_table
from crosscut.corpus.finished import WORK_FOLDER, FinishedRun

_NEAREST = 3
"""Ids that are named in place of one that is not there."""

_COMPARED = 4000
"""Ids whose spelling is compared with that of one that is not there."""


class Place(NamedTuple):
    """Place of a document."""

    work: Path
    part: str
    row: int


@dataclass(frozen=True)
class Runs:
    """The run that is told of, whose stages may not all be done, and the earlier ones that it adds to."""

    work: Path
    """Its folder of stages."""

    cleaned: bool
    """Whether the stage `cleaning` is among them."""

    against: tuple[str, ...] = ()
    """Output folders of the earlier runs."""

    def is_cleaned(self, work: Path) -> bool:
        """Whether the run with this folder of stages, one of these, cleans its texts."""
        if work == self.work:
            return self.cleaned
        finished = FinishedRun.read(work)
        return finished is not None and finished.cleaned

    def locate(self, name: str) -> tuple[Path, str]:
        """The folder of stages of the run that a document is of, and its id there."""
        for folder in sorted(self.against, key=len, reverse=True):
            if name.startswith(before := earlier_id(folder, "")):
                return Path(folder) / WORK_FOLDER, name.removeprefix(before)
        return self.work, name


def parts_of(work: Path) -> list[str]:
    """Names of the parts of a corpus, in its order."""
    return sorted(path.stem for path in (work / INGEST).glob("*.arrow"))


def id_columns(work: Path) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The ids of each part."""
    for part in parts_of(work):
        yield part, read_columns(work / INGEST / f"{part}.arrow", "id")["id"]


def find_documents(runs: Runs, names: Iterable[str]) -> dict[str, Place]:
    """Where some documents lie, by their names; those that their run does not have are left out."""
    wanted: dict[Path, dict[str, str]] = {}
    for name in names:
        work, document_id = runs.locate(name)
        wanted.setdefault(work, {})[document_id] = name
    found: dict[str, Place] = {}
    for work, of_run in wanted.items():
        found |= {of_run[document_id]: place for document_id, place in _find_in(work, set(of_run))}
    return found


def _find_in(work: Path, wanted: set[str]) -> Iterator[tuple[str, Place]]:
    for part, column in id_columns(work):
        if not wanted:
            return
        rows = np.flatnonzero(pc.is_in(column, value_set=pa.array(sorted(wanted), pa.string())).to_numpy())
        for row in rows.tolist():
            document_id = column[row].as_py()
            wanted.discard(document_id)
            yield document_id, Place(work, part, row)


def texts_read(places: Iterable[Place]) -> dict[Place, str]:
    """Texts as they were read; each part is opened once."""
    found: dict[Place, str] = {}
    for (work, part), of_part in groupby(sorted(set(places)), key=lambda place: place[:2]):
        column = read_columns(work / INGEST / f"{part}.arrow", "text")["text"]
        found |= {place: str(column[place.row].as_py()) for place in of_part}
    return found


def texts_cleaned(runs: Runs, places: Iterable[Place]) -> dict[Place, str]:
    """Texts as they were mended, of the documents that came so far, in runs that do so."""
    found: dict[Place, str] = {}
    for (work, part), of_part in groupby(sorted(set(places)), key=lambda place: place[:2]):
        path = work / CLEANING / f"{part}.arrow"
        if not runs.is_cleaned(work) or not path.is_file():
            continue
        table = read_table(path)
        rows = table["row"].to_numpy()
        for place in of_part:
            at = int(np.searchsorted(rows, place.row))
            if at < len(rows) and rows[at] == place.row:
                found[place] = str(table["text"][at].as_py())
    return found


def latest_texts(runs: Runs, places: Iterable[Place]) -> dict[Place, str]:
    """Texts as the latest stage left them."""
    wanted = set(places)
    cleaned = texts_cleaned(runs, wanted)
    return {**texts_read(wanted - cleaned.keys()), **cleaned}


def near_ids(work: Path, wanted: str) -> list[str]:
    """Ids of the corpus that are most like one that it does not have: of the same file, or else spelled alike."""
    file, _, record = wanted.rpartition("#")
    same_file: list[str] = []
    pool: list[str] = []
    for _, column in id_columns(work):
        own = column.filter(pc.starts_with(column, f"{file}#")).to_pylist() if file else []
        same_file = heapq.nsmallest(_NEAREST, [*same_file, *own], key=lambda name: _distance(name, record))
        if len(pool) < _COMPARED:
            pool += column.slice(0, _COMPARED // 4).to_pylist()
    return same_file or difflib.get_close_matches(wanted, pool, n=_NEAREST, cutoff=0.5)


def _distance(name: str, record: str) -> int:
    number = name.rpartition("#")[2]
    return abs(int(number) - int(record)) if number.isdecimal() and record.isdecimal() else 0
