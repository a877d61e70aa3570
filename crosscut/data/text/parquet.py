"""Read the text column of a parquet file, row by row.

pyarrow reads the format. pyarrow is imported only here, because it is large and most corpora do not need it. Only a few
hundred rows are in memory at a time.
"""

from collections.abc import Iterator

from crosscut.config.errors import DamagedDataError, DataError
from crosscut.config.system.extras import install_command
from crosscut.data.text.sources import Source, unreadable

ROWS_AT_ONCE = 256


def read_parquet(source: Source, text_key: str) -> Iterator[tuple[str, int, int]]:
    """Read the column `text_key` row by row.

    Yields (text, row number counted from 1, estimated number of bytes of the file read so far). Raises `DataError` if
    pyarrow is not installed, if the file is damaged or not a parquet file, if the column is missing or holds no
    strings, or if a row's text is null or not UTF-8.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            f"`{source.name}` needs pyarrow, but pyarrow is not installed. Run `{install_command('parquet')}`."
        ) from None
    row = 0
    try:
        with pq.ParquetFile(source.path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_column(source, dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True)), text_key)
            num_rows = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[text_key]):
                for value in batch.column(0):
                    row += 1
                    text = value.as_py()
                    if text is None:
                        raise DataError(
                            f"`{source.name}`, row {row}, must hold a string under `{text_key}`, but holds null. "
                            f"Remove the row, or set `data.text_key` (or `evaluation.text_key`) to another column."
                        )
                    yield text, row, source.size * row // num_rows
    except pa.ArrowException as error:
        raise _damaged(source, error) from None
    except UnicodeDecodeError:
        raise DataError(
            f"`{source.name}`, row {row}, must be UTF-8 text, but is not. Correct or remove the row."
        ) from None
    except OSError as error:
        # pyarrow also reports damaged pages as OSError, but without an error number of the operating system.
        raise (unreadable(source.name, error) if error.errno else _damaged(source, error)) from None


def _damaged(source: Source, error: Exception) -> DamagedDataError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return DamagedDataError(
        f"`{source.name}` must be an undamaged parquet file, but is not: {reason}. Get the file again."
    )


def _check_column(source: Source, columns: dict[str, object], text_key: str) -> None:
    if text_key not in columns:
        raise DataError(
            f"`{source.name}` must have a column `{text_key}`, but its columns are: {', '.join(columns) or 'none'}. "
            f"Set `data.text_key` (or `evaluation.text_key`) to the column of the text."
        )
    if str(columns[text_key]) not in ("string", "large_string", "string_view"):
        raise DataError(
            f"Column `{text_key}` of `{source.name}` must hold strings, but holds {columns[text_key]}. "
            f"Set `data.text_key` (or `evaluation.text_key`) to the column of the text."
        )
