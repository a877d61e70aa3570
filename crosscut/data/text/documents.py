"""Read documents from files as a stream.

A line of a .jsonl or .tsv file or a row of a .parquet file is one document. A .txt file has no document boundaries and
is cut at ends of paragraphs into documents of at most 16,384 characters, so that a single book can be split into
training and validation. Only one part of one file is in memory at a time.
"""

import codecs
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

from crosscut.config.errors import DamagedError, DataError
from crosscut.data.text.lines import Line, read_lines
from crosscut.data.text.parquet import read_parquet_records
from crosscut.data.text.records import RawRecord, RecordFile, Reject, read_json_records
from crosscut.data.text.sources import TextSource, find_sources, read_chunks, undecodable, unreadable

PIECE_CHARACTERS = 16 * 1024
"""Maximum number of characters in a document that is cut from a .txt file."""

ROWS_AT_ONCE = 256
"""Number of rows of a .parquet file in memory at a time."""

_HOLE = "\0" * PIECE_CHARACTERS
"""Document that consists of NUL characters, and counts as blank. A crash can leave a hole in a file, and a hole reads
as NUL characters."""

_PARAGRAPH_END = re.compile(r"\n[ \t]*\n+")
_LINE_END = re.compile(r"\n")
_WORD_END = re.compile(r"\s+")


class TextDocument(NamedTuple):
    """A text and its origin."""

    text: str
    """Text of the document. It is blank only if blank documents were requested."""

    source: TextSource
    """File that contains the document."""

    record: int
    """Line of the file at which the document begins (text, jsonl), or row of the file (parquet), counted from 1."""

    position: int
    """Number of bytes on disk, over the whole corpus, that had been read when the document was complete. Progress bars
    use this number.
    """


def read_documents(
    patterns: Sequence[str], *, text_key: str = "text", setting: str = "data.text", blank: bool = False
) -> Iterator[TextDocument]:
    """Read the documents of a corpus one by one, in the order of `find_sources`.

    `text_key` is the key (jsonl) or the column (parquet) of the text. `setting` is the name of the option that holds
    `patterns`, for messages. Blank documents are skipped unless `blank` is set.

    Raises the errors of `find_sources` and `read_chunks`. Also raises `DataError`, with the file and the line or row,
    for bytes that are not UTF-8, for a line that is not JSON, and for a text that is missing or not a string. Raises
    `DataError` at the end if no document has text.
    """
    return read_sources(find_sources(patterns, setting=setting), text_key=text_key, blank=blank)


def read_sources(sources: Sequence[TextSource], *, text_key: str, blank: bool = False) -> Iterator[TextDocument]:
    """Read the documents of given sources; see `read_documents`."""
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "tsv": _read_tsv}
    empty = True
    starts = accumulate((source.size for source in sources), initial=0)
    for source, start in zip(sources, starts, strict=False):
        with _damage_reported_first(source):
            for record in readers[source.format](source, text_key):
                if isinstance(record, Reject):
                    raise record.error
                text = record.text
                has_text = bool(text) and not text.isspace() and text != _HOLE
                empty = empty and not has_text
                if has_text or blank:
                    yield TextDocument(text, source, record.number, start + record.position)
    if empty:
        raise DataError(
            f"The corpus must hold text, but all documents are blank (files: {len(sources)}, first file: "
            f"`{sources[0].name}`). Name files that contain text."
        )


@contextmanager
def _damage_reported_first(source: TextSource) -> Iterator[None]:
    """Context that reports damage in a compressed source before any error in its text. The text may be wrong because
    the data is damaged, and gzip detects damage only at the end of the data. Errors of the disk become `DataError`.
    """
    try:
        yield
    except OSError as error:
        raise unreadable(source.name, error) from None
    except DataError as error:
        if source.compression and not isinstance(error, DamagedError):
            for _ in read_chunks(source):
                pass
        raise


def _read_text(source: TextSource, _text_key: str) -> Iterator[RawRecord]:
    line, buffer, position = 1, "", 0
    for text, position in _decode(source):
        buffer += text
        start = 0
        while len(buffer) - start > PIECE_CHARACTERS:
            end = _cut(buffer, start)
            piece = buffer[start:end]
            yield RawRecord(piece, line, position)
            line += piece.count("\n")
            start = end
        buffer = buffer[start:]
    yield RawRecord(buffer, line, position)


def _cut(text: str, start: int) -> int:
    """End of the document that begins at `start`. The end lies in the second half of the allowed length, at a paragraph
    end, line end or word end if there is one, in this order of preference.

    The end lies before the last character that is not blank, so the next document has text. Otherwise a run of blanks
    that crosses the allowed length could become a blank document, which is skipped.
    """
    middle, end = start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS
    if text.startswith(_HOLE, start):
        return end
    last = middle + len(text[middle : end + 1].rstrip()) - 1
    if last <= middle:  # half of the allowed length is blank
        return end
    for mark in (_PARAGRAPH_END, _LINE_END, _WORD_END):
        ends = [match.end() for match in mark.finditer(text, middle, last)]
        if ends:
            return ends[-1]
    return last


def _decode(source: TextSource) -> Iterator[tuple[str, int]]:
    """Decode UTF-8 to text with Unix line ends and without a byte-order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset = position = 0
    first = True

    def decode(chunk: bytes, final: bool) -> str:
        held = len(decoder.getstate()[0])
        try:
            return newlines.decode(decoder.decode(chunk, final), final)
        except UnicodeDecodeError as error:
            raise DataError(undecodable(source.name, source.compression, offset - held + error.start)) from None

    for chunk, position in read_chunks(source):
        text = decode(chunk, False)
        offset += len(chunk)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        yield text, position
    yield decode(b"", True), position


def _read_jsonl(source: TextSource, text_key: str) -> Iterator[RawRecord | Reject]:
    return read_json_records(_record_file(source, text_key), read_chunks(source))


def _read_parquet(source: TextSource, text_key: str) -> Iterator[RawRecord | Reject]:
    return read_parquet_records(_record_file(source, text_key), source.path, rows_at_once=ROWS_AT_ONCE)


def _record_file(source: TextSource, text_key: str) -> RecordFile:
    return RecordFile(name=source.name, size=source.size, compression=source.compression, text_key=text_key)


def _read_tsv(source: TextSource, text_key: str) -> Iterator[RawRecord]:
    """Read a table with a header. Fields are taken as they are: quotes have no special meaning."""
    rows = _split_rows(source)
    columns, _ = next(rows, ([""], None))
    if text_key not in columns:
        raise DataError(
            f"`{source.name}` must have a column `{text_key}`, but its columns are: {', '.join(columns)}. Set "
            f"`data.text_key` (or `evaluation.text_key`) to the column of the text."
        )
    for fields, line in rows:
        if len(fields) == len(columns):
            yield RawRecord(fields[columns.index(text_key)], line.number, line.position)
        elif any(fields):
            raise DataError(
                f"`{source.name}`, line {line.number}, must have {len(columns)} columns, like the first line, but has "
                f"{len(fields)}. Correct the line."
            )


def _split_rows(source: TextSource) -> Iterator[tuple[list[str], Line]]:
    """Yield the fields of each line of a table."""
    for line in read_lines(read_chunks(source)):
        try:
            decoded = line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(undecodable(source.name, source.compression, line.start + error.start)) from None
        yield decoded.removesuffix("\r").split("\t"), line
