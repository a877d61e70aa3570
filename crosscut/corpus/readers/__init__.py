"""Readers: the documents of a file, one by one, each in its place, and what of the file cannot be read.

A reader is a function of a `File` and a `Reading`. It holds little of the file at a time, and what it cannot read costs
no other document: it says where and why (`Reject`) and goes on.
"""

from collections.abc import Callable, Iterator

from crosscut.corpus.files import File
from crosscut.corpus.readers.record import Item, Reading, Reject, Skip, Text

__all__ = ["Item", "Reader", "Reading", "Reject", "Skip", "Text", "find_reader"]

Reader = Callable[[File, Reading], Iterator[Item]]


def find_reader(kind: str) -> Reader:
    """The reader of a format; the libraries that only it needs are imported with it."""
    match kind:
        case "jsonl":
            from crosscut.corpus.readers.jsonl import read_jsonl as read
        case "parquet":
            from crosscut.corpus.readers.parquet import read_parquet as read
        case "text":
            from crosscut.corpus.readers.text import read_text as read
        case "html":
            from crosscut.corpus.readers.html import read_html as read
        case "mail":
            from crosscut.corpus.readers.mail import read_mail as read
        case "wikipedia":
            from crosscut.corpus.readers.wikipedia import read_wikipedia as read
        case "megatron":
            from crosscut.corpus.readers.megatron import read_megatron as read
        case _:
            raise ValueError(f"no format: {kind}")
    return read
