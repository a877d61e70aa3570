"""Readers: the documents of a file, one by one, each in its place, and what of the file cannot be read.

A reader is a function of a `File` and a `Reading`. It holds little of the file at a time, and what it cannot read costs
no other document: it says where and why (`Reject`) and goes on.
"""

from collections.abc import Callable, Iterator
from importlib import import_module

from crosscut.config.errors import DataError
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, Reading, Reject, Skip, Text

__all__ = ["Item", "Reader", "Reading", "Reject", "Skip", "Text", "find_reader"]

Reader = Callable[[File, Reading], Iterator[Item]]


def find_reader(kind: str) -> Reader:
    """The reader of a format, with the libraries that only it needs. Raises `DataError` when one is not installed."""
    try:
        module = import_module(f"crosscut.corpus.readers.{kind}")
    except ModuleNotFoundError as error:
        raise DataError(
            f"Files of the format `{kind}` need `{error.name}` to be read, but it is not installed. "
            f"Type `pip install 'crosscut[corpus]'`."
        ) from None
    reader: Reader = getattr(module, f"read_{kind}")
    return reader
