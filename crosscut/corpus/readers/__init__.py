"""Readers yield the documents of a file one by one, and a reject for each record that cannot be read.

A reader is a function that takes a `File` and the settings for reading it (`ReaderSettings`). A reader holds only a
small section of the file in memory at a time. If a record is unreadable, the reader yields a `Reject` with the position
and the reason, and continues with the next record.
"""

from collections.abc import Callable, Iterator
from importlib import import_module

from crosscut.config.errors import DataError
from crosscut.config.system.extras import install_command
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, Skip
from crosscut.data.text.records import Reject

__all__ = ["Item", "RawText", "Reader", "ReaderSettings", "Reject", "Skip", "find_reader"]

Reader = Callable[[File, ReaderSettings], Iterator[Item]]

_ARCHIVES = ("warc", "wet")


def find_reader(kind: str) -> Reader:
    """Import the reader of a format. Raises `DataError` if a library that the reader needs is not installed."""
    folder = "crosscut.corpus.readers.archives" if kind in _ARCHIVES else "crosscut.corpus.readers"
    try:
        module = import_module(f"{folder}.{kind}")
    except ModuleNotFoundError as error:
        raise DataError(
            f"Files of the format `{kind}` need the package `{error.name}`, but `{error.name}` is not installed. "
            f"Run `{install_command('corpus')}`."
        ) from None
    reader: Reader = getattr(module, f"read_{kind}")
    return reader
