"""Parts: files that hold the documents of a corpus between the stages, some megabytes of documents per file.

A part is an Arrow file with a row for each document. The name and the rows of a part never change. A stage that drops
documents writes the dropped rows, the reasons, and the documents that they were matched with (`Drop`). A stage that
changes text writes the new text of the remaining rows. The history of a document can therefore be read back, and no
stage copies data that it does not change.

    work/ingest/000002-0001.arrow            id, text, url, karma, title     documents as they were read
    work/cleaning/000002-0001.arrow          row, text                       repaired texts
    work/language/000002-0001.drops.arrow    row, rule, detail, other        dropped documents
    work/language/000002-0001.marks.arrow    row, language, score            measurements of all documents
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

INGEST = "ingest"
"""Name of the stage that writes the parts, and of its folder."""

CLEANING = "cleaning"
"""Name of the stage that repairs texts, and of its folder."""

DOCUMENTS = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.large_string()),
        ("url", pa.string()),
        ("karma", pa.float64()),
        ("title", pa.string()),
    ]
)
"""Columns of an ingested part. For a document without URL, title or karma, `url` and `title` are empty and `karma` is
null."""

TEXTS = pa.schema([("row", pa.uint32()), ("text", pa.large_string())])
"""Columns of a part's repaired texts."""

DROPS = pa.schema([("row", pa.uint32()), ("rule", pa.string()), ("detail", pa.string()), ("other", pa.string())])
"""Columns of the documents that a filter dropped, as in `Drop`."""

Rows = npt.NDArray[np.uint32]


def count_bytes(text: str) -> int:
    """Length of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


class Document(NamedTuple):
    """One document of a part."""

    row: int
    """Row of the document in its part, from 0. The row is the same in all stages."""

    id: str
    """Id `source/file#record`, which says where the text comes from."""

    text: str
    """Text after the latest stage."""

    url: str = ""
    """URL where the document was published, or empty if unknown."""

    karma: float | None = None
    """Votes for the document's link."""

    title: str = ""
    """Title, or empty if the document has none."""

    @property
    def num_bytes(self) -> int:
        """Length of the text in bytes of UTF-8."""
        return count_bytes(self.text)


class Drop(NamedTuple):
    """A document that a filter drops, and the reason."""

    row: int
    """Row of the document in its part."""

    rule: str
    """Name of the rule that drops the document: a few fixed words, such as `domain` or `too short`."""

    detail: str = ""
    """The value that the rule found in this document, such as `93 tokens`."""

    other: str = ""
    """The document that this one was matched with (named as in `Collection.ids`), or the test set."""


@dataclass(frozen=True)
class Part:
    """A reference to a part at a certain point of the pipeline: the input of a task of the next stage.

    The pickled size is a few bytes, because the documents stay on the disk.
    """

    work: Path
    """Work folder, which contains the folders of the stages."""

    name: str
    """Name of the part's files without the suffix."""

    filters: tuple[str, ...] = ()
    """Names, in order, of the earlier filters. The documents that they dropped are left out."""

    cleaned: bool = False
    """Whether the texts of the stage `cleaning` replace the texts of `ingest`."""

    def documents(self) -> Iterator[Document]:
        """Read the remaining documents, in the order of their rows."""
        table = read_table(self.work / INGEST / f"{self.name}.arrow")
        left = np.setdiff1d(np.arange(table.num_rows, dtype=np.uint32), self.dropped(), assume_unique=True)
        yield from self._at(table, left)

    def select(self, rows: Rows) -> Iterator[Document]:
        """Read the documents of the given rows, in that order. Each row must have a text."""
        yield from self._at(read_table(self.work / INGEST / f"{self.name}.arrow"), rows)

    def _at(self, table: pa.Table, rows: Rows) -> Iterator[Document]:
        columns = [table[name].take(rows).to_pylist() for name in ("id", "url", "karma", "title")]
        for row, text, (name, url, karma, title) in zip(
            rows.tolist(), self._texts(table, rows), zip(*columns, strict=True), strict=True
        ):
            yield Document(row, name, text, url, karma, title)

    def sizes(self) -> dict[int, int]:
        """Bytes of text of each remaining document, by its row. The texts themselves are not read."""
        table = read_table(self.work / (CLEANING if self.cleaned else INGEST) / f"{self.name}.arrow")
        rows = table["row"].to_numpy() if self.cleaned else np.arange(table.num_rows, dtype=np.uint32)
        lengths = pc.binary_length(table["text"]).to_numpy()
        left = ~np.isin(rows, self.dropped())
        return dict(zip(rows[left].tolist(), lengths[left].tolist(), strict=True))

    def dropped(self) -> Rows:
        """Rows that the filters have dropped, ascending."""
        rows = [read_drops(self.work, stage, self.name)["row"].to_numpy() for stage in self.filters]
        return np.unique(np.concatenate(rows)) if rows else np.empty(0, dtype=np.uint32)

    def _texts(self, table: pa.Table, rows: Rows) -> list[str]:
        if not self.cleaned:
            return list(table["text"].take(rows).to_pylist())
        cleaned = read_table(self.work / CLEANING / f"{self.name}.arrow")
        return list(cleaned["text"].take(np.searchsorted(cleaned["row"].to_numpy(), rows)).to_pylist())


@dataclass(frozen=True)
class Judgement:
    """Decision of a filter about the documents of a part."""

    drops: Sequence[Drop] = ()
    """The documents that the filter drops."""

    marks: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Measurements: for each name a sequence with one value per document, also for the dropped documents."""


def read_table(path: Path) -> pa.Table:
    """Read an Arrow file. The columns of an uncompressed file are mapped from the disk and not copied."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def read_columns(path: Path, *names: str) -> pa.Table:
    """Read some columns of an Arrow file. The other columns are neither read nor uncompressed."""
    with pa.memory_map(str(path)) as source:
        schema = pa.ipc.open_file(source).schema
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
        return pa.ipc.open_file(source, options=options).read_all()


def write_table(path: Path, columns: Mapping[str, Any], schema: pa.Schema, *, packed: bool = False) -> None:
    """Write columns as an Arrow file. Equal values give equal bytes.

    `packed` compresses the file with LZ4, which suits files that are always read completely.
    """
    table = pa.table(dict(columns), schema=schema)
    options = pa.ipc.IpcWriteOptions(compression="lz4" if packed else None)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(table)


def drops_name(part: str) -> str:
    """Name of the file with the documents of a part that a filter dropped."""
    return f"{part}.drops.arrow"


def marks_name(part: str) -> str:
    """Name of the file with a filter's measurements of the documents of a part."""
    return f"{part}.marks.arrow"


def read_drops(work: Path, stage: str, part: str) -> pa.Table:
    """Read the documents of a part that a filter dropped, as a table with the columns `DROPS`."""
    return read_table(work / stage / drops_name(part))


def write_drops(path: Path, drops: Sequence[Drop]) -> None:
    """Write the dropped documents of a part, ascending by row."""
    ordered = sorted(drops)
    columns = {name: [getattr(drop, name) for drop in ordered] for name in DROPS.names}
    write_table(path, columns, DROPS)
