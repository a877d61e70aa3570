"""Origins of documents: the paths of the files that the stage `ingest` has read, and the records that it has skipped.

Each task of the stage writes two files. `<task>.files.jsonl` has the path or URL of each file, because ids hold only
the file's name (see `readers.files`). `<task>.skipped.feather` has each record that is not meant to become a document,
such as a blank text. A dump may have millions of such records, so both files are read and written in bounded memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from crosscut.corpus.documents import INGEST
from crosscut.corpus.json_rows import read_rows

SKIPPED = pa.schema([("name", pa.string()), ("record", pa.uint64()), ("rule", pa.string())])
"""Columns of the file with the skipped records of a task. The fields of `Skipped` explain the columns."""

_ROWS_AT_ONCE = 1 << 16


class Skipped(NamedTuple):
    """A record that is not meant to become a document."""

    name: str
    """Name of the file as in ids: `source/file`."""

    record: int
    """Number of the record in the file, or 0 if unknown."""

    rule: str
    """Kind of record, such as `blank` or `redirect`."""


def files_name(task: str) -> str:
    """Name of the file with the paths of the files that the given task has read."""
    return f"{task}.files.jsonl"


def skipped_name(task: str) -> str:
    """Name of the file with the records that the given task has skipped."""
    return f"{task}.skipped.feather"


def write_files(path: Path, files: Sequence[tuple[str, str]]) -> None:
    """Write the name and the path or URL of each file. Bytes of a path that are not UTF-8 are escaped."""
    with path.open("w", encoding="utf-8") as out:
        for name, url in files:
            readable = url.encode("utf-8", "backslashreplace").decode("utf-8")
            out.write(json.dumps({"name": name, "file": readable}, ensure_ascii=False) + "\n")


def find_path(work: Path, name: str, *, task: str = "") -> str | None:
    """Find the path or URL of a file by its name in ids, among the files of one task or of all tasks.

    Returns None if the corpus has no file of this name.
    """
    paths = [work / INGEST / files_name(task)] if task else sorted((work / INGEST).glob(files_name("*")))
    for path in paths:
        for row in read_rows(path, frozenset({"name", "file"})) if path.is_file() else ():
            if row["name"] == name:
                return str(row["file"])
    return None


class SkippedWriter:
    """Writer for the skipped records of a task. Use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, SKIPPED, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        self._rows: list[Skipped] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self._writer.close()
        self._sink.close()

    def add(self, skipped: Skipped) -> None:
        """Add a record. The file is complete at the end of the `with` statement."""
        self._rows.append(skipped)
        if len(self._rows) == _ROWS_AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._rows:
            columns = [list(column) for column in zip(*self._rows, strict=True)]
            self._writer.write_batch(pa.record_batch(columns, schema=SKIPPED))
        self._rows = []


def read_skipped(work: Path) -> Iterator[Skipped]:
    """Read the skipped records of a corpus, in the order of the corpus."""
    for path in sorted((work / INGEST).glob(skipped_name("*"))):
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                rows = reader.get_batch(number).to_pydict()
                yield from map(Skipped, rows["name"], rows["record"], rows["rule"])
