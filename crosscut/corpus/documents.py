"""Parts: files that hold the documents of a corpus between the stages, some megabytes of documents per file.

A part is an Arrow file with a row for each document. The name and the rows of a part never change. A stage that drops
documents writes a file with the row of each dropped document, the reason, and the matching document if there is one
(`Drop`). A stage that changes text writes a file with the new texts. A stage never copies data that it leaves
unchanged. The history of every document can be read from these files.

    work/ingest/000002-0001.arrow            id, text, url, karma, title     documents as they were read
    work/cleaning/000002-0001.arrow          row, text                       repaired texts
    work/language/000002-0001.drops.arrow    row, rule, detail, other        dropped documents
    work/language/000002-0001.marks.arrow    row, language, score            measurements of all documents
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from crosscut.corpus.execution.stages import CorpusStage, Output, Yields

INGEST = "ingest"
"""Name of the first stage, which reads the source files and writes the parts. The folder of the stage has the same
name."""

CLEANING = "cleaning"
"""Name of the stage that repairs texts. The folder of the stage has the same name."""

DOCUMENTS = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.large_string()),
        ("url", pa.string()),
        ("karma", pa.float64()),
        ("title", pa.string()),
    ]
)
"""Columns of a part (an Arrow file of documents) as the stage `ingest` writes it. `url` and `title` are empty if
unknown; `karma`, the number of votes, is null if unknown."""

TEXTS = pa.schema([("row", pa.uint32()), ("text", pa.large_string())])
"""Columns of the file with a part's repaired texts: the row of the document in the part, and the new text."""

DROPS = pa.schema([("row", pa.uint32()), ("rule", pa.string()), ("detail", pa.string()), ("other", pa.string())])
"""Columns of the file for the documents that a filter dropped from a part. The fields of `Drop` explain the columns."""

DROPS_SUFFIX = ".drops.arrow"
"""Suffix of the file for the documents that a filter dropped from a part. The file has the columns `DROPS`."""

MARKS_SUFFIX = ".marks.arrow"
"""Suffix of the file with the measurements that a filter made on the documents of a part."""

Rows = npt.NDArray[np.uint32]


def count_bytes(text: str) -> int:
    """Length of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


class Document(NamedTuple):
    """A document of a corpus, as read from a part (an Arrow file of documents)."""

    row: int
    """Row of the document in its part, from 0. A document has the same row in the files of all stages."""

    id: str
    """Id `source/file#record`, which names the origin of the text."""

    text: str
    """Text of the document. After the stage `cleaning`, this is the repaired text."""

    url: str = ""
    """URL where the document was published, or empty if unknown."""

    karma: float | None = None
    """Number of votes for the link to the document, or None if unknown."""

    title: str = ""
    """Title, or empty if the document has none."""

    @property
    def num_bytes(self) -> int:
        """Length of the text in bytes of UTF-8."""
        return count_bytes(self.text)


class Drop(NamedTuple):
    """A document that a filter drops, and the reason."""

    row: int
    """Row of the document in its part, from 0."""

    rule: str
    """Name of the rule that drops the document, such as `domain` or `too short`."""

    detail: str = ""
    """Value that the rule found in this document, such as `93 tokens`. Empty if the rule has no value."""

    other: str = ""
    """Id of the matching document (see `Collection.ids`) or name of the matching test set. Empty if nothing matches."""


@dataclass(frozen=True)
class Lineage:
    """The stages that documents have passed through, with what these stages yield: drops or new texts.

    The pipeline extends the lineage with each stage (`after`) and hands it to the next one. The files of a stage that
    yields neither are not read with the documents, so the lineage does not name the stage.
    """

    filters: tuple[str, ...] = ()
    """Names of the stages that drop documents, in order."""

    cleaned: bool = False
    """Whether the stage `cleaning` has run. Its texts replace the texts of the stage `ingest`."""

    def after(self, stages: Sequence[CorpusStage]) -> Lineage:
        """Lineage of documents that have also passed through the given stages."""
        return Lineage(
            (*self.filters, *(stage.name for stage in stages if Yields.DROPS in stage.yields)),
            self.cleaned or any(Yields.TEXTS in stage.yields for stage in stages),
        )


READ = Lineage()
"""Lineage of documents as the stage `ingest` wrote them."""


@dataclass(frozen=True)
class Part:
    """Reference to a part (an Arrow file of documents), with the stages that the documents have passed through.

    Tasks take a `Part` as input. A pickled `Part` has only a few bytes, because the documents stay on the disk.
    """

    work: Path
    """Work folder of the run, which contains a folder for each stage."""

    name: str
    """Name of the part's files without the suffix. Every stage uses the same name."""

    lineage: Lineage = READ
    """Documents that a stage of the lineage dropped are left out, and texts are the latest of the lineage."""

    def file(self, stage: str, suffix: str = ".arrow") -> Path:
        """Path of the part's file with the given suffix in the folder of a stage."""
        return self.work / stage / f"{self.name}{suffix}"

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that `documents` reads: the texts, and the rows that filters dropped."""
        stages = (INGEST, CLEANING) if self.lineage.cleaned else (INGEST,)
        return (*map(self.file, stages), *(self.file(stage, DROPS_SUFFIX) for stage in self.lineage.filters))

    def documents(self) -> Iterator[Document]:
        """Read the documents that no filter dropped, in the order of their rows."""
        rows = self.rows()
        names = ("id", "url", "karma", "title")
        table = read_columns(self.file(INGEST), *names)
        columns = [table[name].take(rows).to_pylist() for name in names]
        for row, text, (name, url, karma, title) in zip(
            rows.tolist(), self.texts(rows), zip(*columns, strict=True), strict=True
        ):
            yield Document(row, name, text, url, karma, title)

    def rows(self) -> Rows:
        """Rows of the documents that no filter dropped, in ascending order. No text is read."""
        count = read_columns(self.file(INGEST), "karma").num_rows
        return np.setdiff1d(np.arange(count, dtype=np.uint32), self.dropped(), assume_unique=True)

    def texts(self, rows: Rows) -> list[str]:
        """Read only the texts of the documents at the given rows, in the order of `rows`.

        After the stage `cleaning`, every row must have a text in the files of the stage `cleaning`.
        """
        if not self.lineage.cleaned:
            return list(read_columns(self.file(INGEST), "text")["text"].take(rows).to_pylist())
        cleaned = read_table(self.file(CLEANING))
        return list(cleaned["text"].take(np.searchsorted(cleaned["row"].to_numpy(), rows)).to_pylist())

    def sizes(self) -> dict[int, int]:
        """Map the row of each remaining document to the size of its text in bytes of UTF-8. No text is decoded."""
        table = read_table(self.file(CLEANING if self.lineage.cleaned else INGEST))
        rows = table["row"].to_numpy() if self.lineage.cleaned else np.arange(table.num_rows, dtype=np.uint32)
        lengths = pc.binary_length(table["text"]).to_numpy()
        left = ~np.isin(rows, self.dropped())
        return dict(zip(rows[left].tolist(), lengths[left].tolist(), strict=True))

    def dropped(self) -> Rows:
        """Row numbers of the documents that filters dropped, in ascending order."""
        rows = [read_drops(self.work, stage, self.name)["row"].to_numpy() for stage in self.lineage.filters]
        return np.unique(np.concatenate(rows)) if rows else np.empty(0, dtype=np.uint32)


@dataclass(frozen=True)
class Judgement:
    """Decision of a filter about the documents of a part (an Arrow file of documents)."""

    drops: Sequence[Drop] = ()
    """The documents that the filter drops."""

    marks: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Measurements that the filter made, keyed by name, such as `score`. Each sequence has one value per document,
    including the dropped documents."""

    counts: Mapping[str, object] = field(default_factory=dict)
    """Further figures of the filter for the report, as JSON values that can be added up over parts."""


def read_table(path: Path) -> pa.Table:
    """Read an Arrow file. The columns of an uncompressed file are memory-mapped and not copied."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def read_columns(path: Path, *names: str) -> pa.Table:
    """Read the named columns of an Arrow file. The other columns are neither read nor decompressed."""
    with pa.memory_map(str(path)) as source:
        schema = pa.ipc.open_file(source).schema
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
        return pa.ipc.open_file(source, options=options).read_all()


def write_table(path: Path, columns: Mapping[str, object], schema: pa.Schema, *, packed: bool = False) -> None:
    """Write columns as an Arrow file. The same values always give the same bytes.

    `packed` compresses the file with LZ4. Use this for files that are always read completely.
    """
    table = pa.table(dict(columns), schema=schema)
    options = pa.ipc.IpcWriteOptions(compression="lz4" if packed else None)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(table)


def read_drops(work: Path, stage: str, part: str) -> pa.Table:
    """Read the documents that the filter `stage` dropped from a part. The table has the columns `DROPS`."""
    return read_table(work / stage / f"{part}{DROPS_SUFFIX}")


def write_rows(path: Path, rows: Sequence[tuple[object, ...]], schema: pa.Schema, *, packed: bool = False) -> None:
    """Write rows as an Arrow file, as `write_table` does."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(schema.names)
    write_table(path, dict(zip(schema.names, columns, strict=True)), schema, packed=packed)


def write_drops(output: Output, part: str, drops: Sequence[Drop]) -> None:
    """Write the dropped documents of one part to a file, ordered by row."""
    write_rows(output.path(f"{part}{DROPS_SUFFIX}"), sorted(drops), DROPS)
