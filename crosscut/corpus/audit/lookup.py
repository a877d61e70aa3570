"""Finding documents by their ids, and their texts, without reading more of a corpus than its ids."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosscut.corpus.documents import CLEANING, INGEST, read_table

_COMPARED = 4000
"""Ids whose spelling is compared with that of one that is not there."""


class Place(NamedTuple):
    """Where a document lies."""

    work: Path
    part: str
    row: int


def parts_of(work: Path) -> list[str]:
    """Names of the parts of a corpus, in its order."""
    return sorted(path.stem for path in (work / INGEST).glob("*.arrow"))


def read_columns(path: Path, *names: str) -> pa.Table:
    """Some columns of an Arrow file; the others are neither read nor unpacked."""
    with pa.memory_map(str(path)) as source:
        schema = pa.ipc.open_file(source).schema
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
        return pa.ipc.open_file(source, options=options).read_all()


def id_columns(work: Path) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The ids of each part."""
    for part in parts_of(work):
        yield part, read_columns(work / INGEST / f"{part}.arrow", "id")["id"]


def find_documents(works: Sequence[Path], ids: Collection[str]) -> dict[str, Place]:
    """Where the documents of some ids lie, in the first folder that has them; those that none has are left out."""
    wanted = set(ids)
    found: dict[str, Place] = {}
    for work in works:
        for part, column in id_columns(work) if wanted else ():
            rows = np.flatnonzero(pc.is_in(column, value_set=pa.array(sorted(wanted), pa.string())).to_numpy())
            for row in rows.tolist():
                name = column[row].as_py()
                found[name] = Place(work, part, row)
                wanted.discard(name)
            if not wanted:
                return found
    return found


def texts_read(places: Iterable[Place]) -> dict[Place, str]:
    """Texts as they were read; each part is opened once."""
    found: dict[Place, str] = {}
    for (work, part), of_part in groupby(sorted(set(places)), key=lambda place: place[:2]):
        column = read_columns(work / INGEST / f"{part}.arrow", "text")["text"]
        found |= {place: str(column[place.row].as_py()) for place in of_part}
    return found


def texts_cleaned(places: Iterable[Place]) -> dict[Place, str]:
    """Texts as they were mended, of the documents that came so far."""
    found: dict[Place, str] = {}
    for (work, part), of_part in groupby(sorted(set(places)), key=lambda place: place[:2]):
        path = work / CLEANING / f"{part}.arrow"
        if not path.is_file():
            continue
        table = read_table(path)
        rows = table["row"].to_numpy()
        for place in of_part:
            at = int(np.searchsorted(rows, place.row))
            if at < len(rows) and rows[at] == place.row:
                found[place] = str(table["text"][at].as_py())
    return found


def latest_texts(places: Iterable[Place]) -> dict[Place, str]:
    """Texts as the latest stage left them."""
    wanted = set(places)
    cleaned = texts_cleaned(wanted)
    return {**texts_read(wanted - cleaned.keys()), **cleaned}


def near_ids(work: Path, wanted: str, count: int = 3) -> list[str]:
    """Ids of the corpus that are most like one that it does not have: of the same file, or else spelled alike."""
    file, _, record = wanted.rpartition("#")
    same_file: list[str] = []
    pool: list[str] = []
    for _, column in id_columns(work):
        own = column.filter(pc.starts_with(column, f"{file}#")).to_pylist() if file else []
        same_file = heapq.nsmallest(count, [*same_file, *own], key=lambda name: _distance(name, record))
        if len(pool) < _COMPARED:
            pool += column.slice(0, _COMPARED // 4).to_pylist()
    return same_file or difflib.get_close_matches(wanted, pool, n=count, cutoff=0.5)


def _distance(name: str, record: str) -> int:
    number = name.rpartition("#")[2]
    return abs(int(number) - int(record)) if number.isdecimal() and record.isdecimal() else 0
