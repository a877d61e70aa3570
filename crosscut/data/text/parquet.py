"""Read the records of .parquet files, row by row, with the text in one column.

pyarrow reads the format. It is imported only for such a file, because it is large, and most training
text does not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING

from crosscut.config.errors import DataError
from crosscut.config.system.extras import install_command
from crosscut.data.text.records import DAMAGED, RawRecord, RecordFile, Reject, excerpt, too_long, without_text

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 16 << 20
"""Maximum size of a batch whose rows are converted at once. The converted strings are copies."""


def read_parquet_records(
    file: RecordFile, opened: Path | IO[bytes], *, rows_at_once: int, begin_group: Callable[[], None] = lambda: None
) -> Iterator[RawRecord | Reject]:
    """Read a parquet file, `rows_at_once` rows at a time. The number of bytes read up to a row is an estimate.

    A file whose text column is missing or does not hold strings is rejected as a whole, with a list of its columns. Of
    a damaged row group, only the rows before the damage are read. `begin_group` is called before each row group is
    read. Raises `DataError` if pyarrow is not installed, and `OSError` if the disk cannot be read.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            f"`{file.name}` needs pyarrow, but pyarrow is not installed. Run `{install_command('parquet')}`."
        ) from None
    try:
        parquet = pq.ParquetFile(opened, buffer_size=1 << 20, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        yield _damaged(file, 1, "the file", file.size, error)
        return
    with parquet:
        wrong = _wrong_schema(file, parquet.schema_arrow)
        if wrong:
            yield wrong
            return
        names = _columns(file, parquet.schema_arrow)
        start = 0
        for group in range(parquet.metadata.num_row_groups):
            begin_group()
            end = start + parquet.metadata.row_group(group).num_rows
            batches = parquet.iter_batches(batch_size=rows_at_once, row_groups=[group], columns=names)
            yield from _read_group(file, names, batches, (start, end), parquet.metadata.num_rows)
            start = end


def _read_group(
    file: RecordFile, names: list[str], batches: Iterator[pa.RecordBatch], rows: tuple[int, int], num_rows: int
) -> Iterator[RawRecord | Reject]:
    """Read the row group that has the given `rows`, a start and an end. The file has `num_rows` rows."""
    import pyarrow as pa

    row, end = rows
    try:
        for batch in batches:
            columns = [batch.column(batch.schema.names.index(name)) for name in names]
            converted = _converted(file, dict(zip(names, columns, strict=True)))
            if converted:
                for text, others in converted:
                    row += 1
                    yield RawRecord(text, row, file.size * row // num_rows, others)
                continue
            for values in zip(*columns, strict=True):
                row += 1
                yield _read_row(file, names, values, row, file.size * row // num_rows)
    except (pa.ArrowException, OSError) as error:
        yield _damaged(file, row + 1, f"rows {row + 1} to {end}", file.size * (end - row) // num_rows, error)


def _converted(file: RecordFile, columns: dict[str, pa.Array]) -> Iterator[tuple[str, Sequence[object]]] | None:
    """Convert the rows of a batch at once, which is faster than row by row. Yield the text of each row, and the values
    of `RecordFile.other_keys`. The result is None if each row must be looked at: if the batch is large, a text is null,
    or a value cannot be converted.
    """
    texts = columns[file.text_key]
    if texts.null_count or sum(column.nbytes for column in columns.values()) > min(file.max_bytes, _BATCH_BYTES):
        return None
    try:
        values = {name: column.to_pylist() for name, column in columns.items()}
    except (ValueError, OverflowError):
        return None
    missing = [None] * len(texts)
    others = [values.get(key, missing) for key in file.other_keys]
    return zip(values[file.text_key], zip(*others, strict=True) if others else repeat(()), strict=False)


def _damaged(file: RecordFile, row: int, what: str, lost: int, error: Exception) -> Reject:
    # pyarrow also reports damaged pages as OSError, but without an error number of the operating system.
    if isinstance(error, OSError) and error.errno:
        raise error
    reason = str(error).partition("\n")[0].rstrip(".")
    message = f"`{file.name}` must be an undamaged parquet file, but is not: {reason}. Get the file again."
    return Reject(f"row {row}", DAMAGED, f"{what} cannot be read: {reason}", lost=max(lost, 1), message=message)


def _wrong_schema(file: RecordFile, schema: pa.Schema) -> Reject | None:
    """Reject of a file whose text column is missing or does not hold strings."""
    import pyarrow as pa

    key, remedy = file.text_key, f"Set {file.setting} to the column of the text."
    if key not in schema.names:
        columns = ", ".join(schema.names) or "none"
        reason = f"there is no column `{key}`; the columns are: {columns}"
        message = f"`{file.name}` must have a column `{key}`, but its columns are: {columns}. {remedy}"
    else:
        kind = schema.types[schema.names.index(key)]
        is_encoded = pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type)
        accepted = {pa.string(), pa.large_string(), pa.string_view()}
        if kind in accepted or (not file.is_strict and (kind == pa.null() or is_encoded)):
            return None
        reason = f"column `{key}` holds {kind} instead of strings"
        message = f"Column `{key}` of `{file.name}` must hold strings, but holds {kind}. {remedy}"
    return Reject("row 1", "other schema", reason, excerpt(str(schema)), lost=max(file.size, 1), message=message)


def _columns(file: RecordFile, schema: pa.Schema) -> list[str]:
    """Names of the columns to read, the text column first.

    Nested columns are left out, because a nested value cannot be a URL, a number of votes or a title.
    """
    import pyarrow as pa

    present = (name for name in file.other_keys if name in schema.names)
    plain = (name for name in present if not pa.types.is_nested(schema.field(name).type))
    return list(dict.fromkeys((file.text_key, *plain)))


def _read_row(
    file: RecordFile, names: list[str], row: tuple[pa.Scalar, ...], number: int, position: int
) -> RawRecord | Reject:
    if file.max_bytes < sys.maxsize and _num_bytes(row[0]) > file.max_bytes:
        return too_long(f"row {number}", "the text", "", file.max_bytes)
    try:
        values = {name: value.as_py() for name, value in zip(names, row, strict=True)}
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} of a string is not UTF-8"
        message = f"`{file.name}`, row {number}, must be UTF-8 text, but is not. Correct or remove the row."
        return Reject(f"row {number}", "not UTF-8", reason, excerpt(error.object), message=message)
    text = values[file.text_key]
    if isinstance(text, str):
        return RawRecord(text, number, position, list(map(values.get, file.other_keys)))
    message = (  # the only value that is not a string is null
        f"`{file.name}`, row {number}, must hold a string under `{file.text_key}`, but holds null. Remove the row, or "
        f"set {file.setting} to another column."
    )
    return without_text(file, values, f"row {number}")._replace(message=message)


def _num_bytes(value: pa.Scalar) -> int:
    buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
    return 0 if buffer is None else buffer.size
