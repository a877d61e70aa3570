"""Read .parquet files. Each row is a document, with the text in one column.

Each file may have different columns and types. A file whose text column is missing or does not hold strings is rejected
as a whole, with a list of its columns.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.jsonl import as_document
from crosscut.corpus.readers.record import Item, Reading, Reject, excerpt, too_long

ROWS_AT_ONCE = 16


def read_parquet(file: File, reading: Reading) -> Iterator[Item]:
    """Yield the documents of a parquet file, in order. Of a damaged row group, only the rows before the damage are
    read.
    """
    with file.open() as stream:
        try:
            parquet = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            yield Reject("row 1", "damaged file", f"the file cannot be read: {_reason(error)}", lost=max(file.size, 1))
            return
        with parquet:
            wrong = _wrong_schema(file, parquet, reading)
            if wrong:
                yield wrong
                return
            start = 0
            for group in range(parquet.metadata.num_row_groups):
                yield from _read_group(file, parquet, group, start, reading)
                start += parquet.metadata.row_group(group).num_rows


def _read_group(file: File, parquet: pq.ParquetFile, group: int, start: int, reading: Reading) -> Iterator[Item]:
    row, num_rows = start, parquet.metadata.num_rows
    file.watch.advance(file.size)
    columns = _columns(parquet.schema_arrow, reading)
    try:
        for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group], columns=columns):
            for values in zip(*(batch.column(name) for name in columns), strict=True):
                row += 1
                yield _read_row(columns, values, reading, row, file.size * row // num_rows)
    except (pa.ArrowException, OSError) as error:
        end = start + parquet.metadata.row_group(group).num_rows
        reason = f"rows {row + 1} to {end} cannot be read: {_reason(error)}"
        yield Reject(f"row {row + 1}", "damaged file", reason, lost=max(file.size * (end - row) // num_rows, 1))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:  # an error of the disk; errors of pyarrow have no number
        raise error
    return str(error).partition("\n")[0].rstrip(".")


def _wrong_schema(file: File, parquet: pq.ParquetFile, reading: Reading) -> Reject | None:
    schema = parquet.schema_arrow
    if reading.text_key not in schema.names:
        reason = f"there is no column `{reading.text_key}`; the columns are: {', '.join(schema.names) or 'none'}"
    else:
        kind = schema.field(reading.text_key).type
        if kind.id in (t.id for t in (pa.string(), pa.large_string(), pa.string_view(), pa.null())):
            return None
        if pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type):
            return None
        reason = f"column `{reading.text_key}` holds {kind} instead of strings"
    return Reject("row 1", "other schema", reason, excerpt(str(schema)), lost=max(file.size, 1))


def _columns(schema: pa.Schema, reading: Reading) -> list[str]:
    """Names of the columns to read, the text column first.

    Nested columns are left out, because a nested value cannot be a URL, a number of votes or a title.
    """
    optional = (reading.url_key, reading.karma_key, reading.title_key)
    plain = (name for name in optional if name in schema.names and not pa.types.is_nested(schema.field(name).type))
    return list(dict.fromkeys(itertools.chain([reading.text_key], plain)))


def _read_row(columns: list[str], values: tuple[Any, ...], reading: Reading, row: int, position: int) -> Item:
    place = f"row {row}"
    if _num_bytes(values[0]) > reading.max_bytes:
        return too_long(place, "the text", "", reading.max_bytes)
    try:
        named = {name: value.as_py() for name, value in zip(columns, values, strict=True)}
    except UnicodeDecodeError as error:
        return Reject(place, "not UTF-8", f"byte {error.start + 1} of a string is not UTF-8", excerpt(error.object))
    return as_document(named, reading, place=place, record=row, position=position)


def _num_bytes(value: Any) -> int:
    buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
    return 0 if buffer is None else buffer.size
