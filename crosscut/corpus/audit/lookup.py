"""Find documents by their names, and read their texts. The search itself reads only ids, no texts.

The name of a document of this run is its id. The name of a document of an earlier run (`duplicates.against`) is the
folder of the earlier run followed by the id (see `earlier_id`), because documents of different runs may have the same
id.
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
from crosscut.corpus.documents import CLEANING, INGEST, Lineage, read_columns, read_table
from crosscut.corpus.finished import WORK_FOLDER, read_finished

_NEAREST = 3
"""Maximum number of similar ids that the message about an unknown id lists."""

_COMPARED = 4000
"""Maximum number of ids that are compared with an unknown id to find similar ids."""


class DocumentPlace(NamedTuple):
    """Location of a document: the work folder of its run, the name of its part (an Arrow file), and its row."""

    work: Path
    part: str
    row: int

    def file(self, stage: str, suffix: str = ".arrow") -> Path:
        """Path of the file with the given suffix that a stage wrote for the document's part."""
        return self.work / stage / f"{self.part}{suffix}"


@dataclass(frozen=True)
class Runs:
    """A run of `crosscut prepare`, and the earlier runs that are named in `duplicates.against`.

    Some stages of the run may not be finished.
    """

    work: Path
    """Work folder of the run, which contains a folder for each stage."""

    lineage: Lineage
    """The stages of the run that yield drops or texts, in order, including the stage `tokens`."""

    against: tuple[str, ...] = ()
    """Output folders of the earlier runs."""

    def is_cleaned(self, work: Path) -> bool:
        """Whether a run has the stage `cleaning`. `work` is the work folder of this run or of an earlier run."""
        lineage = self.lineage if work == self.work else read_finished(work)
        return lineage is not None and lineage.cleaned

    def locate(self, name: str) -> tuple[Path, str]:
        """Return the work folder of the run that has the named document, and the id of the document in that run."""
        for folder in sorted(self.against, key=len, reverse=True):
            if name.startswith(before := earlier_id(folder, "")):
                return Path(folder) / WORK_FOLDER, name.removeprefix(before)
        return self.work, name


def parts_of(work: Path) -> list[str]:
    """Names of the parts (Arrow files of documents) of a corpus, in order."""
    return sorted(path.stem for path in (work / INGEST).glob("*.arrow"))


def id_columns(work: Path) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """Yield the name of each part (an Arrow file of documents), together with the ids of its documents."""
    for part in parts_of(work):
        yield part, read_columns(work / INGEST / f"{part}.arrow", "id")["id"]


def find_documents(runs: Runs, names: Iterable[str]) -> dict[str, DocumentPlace]:
    """Find documents by their names. Returns the location of each document by name; unknown names are left out."""
    wanted: dict[Path, dict[str, str]] = {}
    for name in names:
        work, document_id = runs.locate(name)
        wanted.setdefault(work, {})[document_id] = name
    found: dict[str, DocumentPlace] = {}
    for work, of_run in wanted.items():
        found |= {of_run[document_id]: place for document_id, place in _find_in(work, set(of_run))}
    return found


def _find_in(work: Path, wanted: set[str]) -> Iterator[tuple[str, DocumentPlace]]:
    for part, column in id_columns(work):
        if not wanted:
            return
        rows = np.flatnonzero(pc.is_in(column, value_set=pa.array(sorted(wanted), pa.string())).to_numpy())
        for row in rows.tolist():
            document_id = column[row].as_py()
            wanted.discard(document_id)
            yield document_id, DocumentPlace(work, part, row)


def texts_read(places: Iterable[DocumentPlace]) -> dict[DocumentPlace, str]:
    """Read the original texts of documents, before cleaning. Each part (an Arrow file) is opened once."""
    found: dict[DocumentPlace, str] = {}
    for (work, part), of_part in groupby(sorted(set(places)), key=lambda place: place[:2]):
        column = read_columns(work / INGEST / f"{part}.arrow", "text")["text"]
        found |= {place: str(column[place.row].as_py()) for place in of_part}
    return found


def texts_cleaned(runs: Runs, places: Iterable[DocumentPlace]) -> dict[DocumentPlace, str]:
    """Read the texts that the stage `cleaning` wrote for documents.

    The result leaves out documents that did not pass this stage, and documents of runs without this stage.
    """
    found: dict[DocumentPlace, str] = {}
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


def latest_texts(runs: Runs, places: Iterable[DocumentPlace]) -> dict[DocumentPlace, str]:
    """Read the latest text of each document: the cleaned text, or the original text if there is no cleaned text."""
    wanted = set(places)
    cleaned = texts_cleaned(runs, wanted)
    return {**texts_read(wanted - cleaned.keys()), **cleaned}


def near_ids(work: Path, wanted: str) -> list[str]:
    """List ids that are similar to `wanted`, an id of the form `source/file#record` that does not exist in the corpus.

    If the corpus has documents from the file that `wanted` names, the ids with the nearest record numbers in this file
    are listed. If the corpus has no such document, ids with a similar spelling are listed.
    """
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
