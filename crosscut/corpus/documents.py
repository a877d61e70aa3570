"""Parts: the documents of a corpus, some megabytes of them to a file, as they lie between the stages.

A part is an Arrow file with a row for each document. Its name and its rows never change: a stage that drops documents
writes which rows, why, and what they were matched with (`Drop`), and a stage that changes text writes the new text of
the rows that are left. So what happened to a document can be read back, and no stage copies what it does not change.

    work/ingest/000002-0001.arrow            id, text, url, karma, title     as it was read
    work/cleaning/000002-0001.arrow          row, text                       as it was mended
    work/language/000002-0001.drops.arrow    row, rule, detail, other        who went
    work/language/000002-0001.marks.arrow    row, language, score            what was measured
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
"""The stage that writes parts; its name is the folder's."""

CLEANING = "cleaning"
"""The stage that writes their texts anew."""

DOCUMENTS = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.large_string()),
        ("url", pa.string()),
        ("karma", pa.float64()),
        ("title", pa.string()),
    ]
)
"""Columns of an ingested part. `url` and `title` are empty and `karma` is null where a document has none."""

TEXTS = pa.schema([("row", pa.uint32()), ("text", pa.large_string())])
"""Columns of a part whose texts were written anew."""

DROPS = pa.schema([("row", pa.uint32()), ("rule", pa.string()), ("detail", pa.string()), ("other", pa.string())])
"""Columns of a filter's drops."""

Rows = npt.NDArray[np.uint32]


def count_bytes(text: str) -> int:
    """Length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


class Document(NamedTuple):
    """One document of a part."""

    row: int
    """Its place in the part, from 0; the same in all stages."""

    id: str
    """`source/file#record`: who reads it finds the text."""

    text: str
    """As the latest stage left it."""

    url: str = ""
    """Where it was published; empty where that is not known."""

    karma: float | None = None
    """Votes for its link."""

    title: str = ""
    """Its title; empty where it has none."""

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8."""
        return count_bytes(self.text)


class Drop(NamedTuple):
    """A document that a filter does not let pass."""

    row: int
    """Its place in the part."""

    rule: str
    """Which rule: a few words that are the same for all that it drops, such as `domain` or `too short`."""

    detail: str = ""
    """What the rule saw in this one, such as `93 tokens`."""

    other: str = ""
    """What it was matched with: a document, as `Collection.ids` names it, or a test set."""


@dataclass(frozen=True)
class Part:
    """A part and the stages behind it: what a task of the next stage is given. Pickles in some bytes."""

    work: Path
    """Folder of the stages."""

    name: str
    """File name without its suffix."""

    filters: tuple[str, ...] = ()
    """Stages whose drops are no longer among the documents, in their order."""

    cleaned: bool = False
    """Whether texts are those of the stage `cleaning`."""

    def documents(self) -> Iterator[Document]:
        """The documents that are left, in the order of their rows."""
        table = read_table(self.work / INGEST / f"{self.name}.arrow")
        left = np.setdiff1d(np.arange(table.num_rows, dtype=np.uint32), self.dropped(), assume_unique=True)
        yield from self._at(table, left)

    def select(self, rows: Rows) -> Iterator[Document]:
        """The documents of some rows, which must be among those with a text, in their order."""
        yield from self._at(read_table(self.work / INGEST / f"{self.name}.arrow"), rows)

    def _at(self, table: pa.Table, rows: Rows) -> Iterator[Document]:
        columns = [table[name].take(rows).to_pylist() for name in ("id", "url", "karma", "title")]
        for row, text, (name, url, karma, title) in zip(
            rows.tolist(), self._texts(table, rows), zip(*columns, strict=True), strict=True
        ):
            yield Document(row, name, text, url, karma, title)

    def sizes(self) -> dict[int, int]:
        """Bytes of text of each document that is left, by its row; mapped texts are not read."""
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
    """What a filter thinks of the documents of a part."""

    drops: Sequence[Drop] = ()
    """Those that do not pass."""

    marks: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """What was measured of each document, passing or not: name to a value for each document given."""


def read_table(path: Path) -> pa.Table:
    """Read an Arrow file; its columns are mapped from the disk, not copied, where the file is not packed."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def read_columns(path: Path, *names: str) -> pa.Table:
    """Some columns of an Arrow file; the others are neither read nor unpacked."""
    with pa.memory_map(str(path)) as source:
        schema = pa.ipc.open_file(source).schema
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
        return pa.ipc.open_file(source, options=options).read_all()


def write_table(path: Path, columns: Mapping[str, Any], schema: pa.Schema, *, packed: bool = False) -> None:
    """Write columns as an Arrow file, the same bytes for the same values; `packed` with LZ4, for what is read whole."""
    table = pa.table(dict(columns), schema=schema)
    options = pa.ipc.IpcWriteOptions(compression="lz4" if packed else None)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(table)


def drops_name(part: str) -> str:
    """Name of the file of a filter's drops from a part."""
    return f"{part}.drops.arrow"


def marks_name(part: str) -> str:
    """Name of the file of a filter's marks on a part."""
    return f"{part}.marks.arrow"


def read_drops(work: Path, stage: str, part: str) -> pa.Table:
    """The drops of a filter from a part, columns `DROPS`."""
    return read_table(work / stage / drops_name(part))


def write_drops(path: Path, drops: Sequence[Drop]) -> None:
    """Write the drops of a part, ascending by row."""
    ordered = sorted(drops)
    columns = {name: [getattr(drop, name) for drop in ordered] for name in DROPS.names}
    write_table(path, columns, DROPS)
