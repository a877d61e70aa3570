"""Read .parquet files. Each row is a document, with the text in one column.

Each file may have different columns and types. A file whose text column is missing or does not hold strings is rejected
as a whole, with a list of its columns.
"""

from collections.abc import Iterator
from functools import partial

from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.jsonl import as_document
from crosscut.corpus.readers.record import Item, ReaderSettings
from crosscut.data.text.parquet import read_parquet_records

ROWS_AT_ONCE = 16


def read_parquet(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the documents of a parquet file, in order. Of a damaged row group, only the rows before the damage are
    read.
    """
    with file.open() as stream:
        advance = partial(file.watch.advance, file.size)
        yield from map(
            as_document,
            read_parquet_records(reading.of_records(file), stream, rows_at_once=ROWS_AT_ONCE, begin_group=advance),
        )
