"""Read .jsonl files. Each line is a document: a JSON object with the text under a key."""

import math
from collections.abc import Iterator
from typing import Any

from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, unless_blank
from crosscut.data.text.json_text import encodable
from crosscut.data.text.records import RawRecord, Reject, read_json_records


def read_jsonl(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the documents of a .jsonl file, in order. Blank lines are ignored."""
    return map(as_document, read_json_records(reading.of_records(file), file.chunks()))


def as_document(record: RawRecord | Reject) -> Item:
    """Make a document from a record. A blank text becomes a `Skip`, and a reject stays as it is.

    An invalid URL, number of votes or title is left out, and the document is kept.
    """
    if isinstance(record, Reject):
        return record
    url, karma, title = record.others
    document = RawText(record.text, record.number, record.position, _string(url), _number(karma), _string(title))
    return unless_blank(document)


def _string(value: object) -> str:
    return value if isinstance(value, str) and encodable(value) else ""


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
