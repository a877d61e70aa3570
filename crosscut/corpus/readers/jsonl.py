"""Read .jsonl files. Each line is a document: a JSON object with the text under a key.

Each line is decoded and parsed separately, so a bad line does not affect other documents.
"""

import math
from collections.abc import Iterator
from typing import Any

from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.lines import Line, read_lines
from crosscut.corpus.readers.record import Item, Reading, Reject, Skip, Text, excerpt, too_long
from crosscut.data.text.json_text import encodable, parse_record

_INCOMPLETE = ("not JSON", "not UTF-8")
"""Kinds of rejects that a truncated file also causes. If the last record of a file is rejected for one of these
reasons, the file may have been cut off inside this record."""


def read_jsonl(file: File, reading: Reading) -> Iterator[Item]:
    """Yield the documents of a .jsonl file, in order. Blank lines are ignored."""
    for line in read_lines(file, reading.max_bytes):
        if isinstance(line, Reject):
            yield line
        elif item := _read_line(line, reading):
            if line.unended and isinstance(item, Reject) and item.rule in _INCOMPLETE:
                item = _broken_off(item)
            yield item


def _broken_off(reject: Reject) -> Reject:
    """Turn the reject of an incomplete last record into the reject of a damaged file. The file was truncated, so more
    records may be lost.
    """
    reason = f"the file ends in the middle of a record, and later records may be missing: {reject.reason}"
    return reject._replace(rule="damaged file", reason=reason, lost=1)


def _read_line(line: Line, reading: Reading) -> Item | None:
    place = f"line {line.number}"
    if line.too_long:
        return too_long(place, "the line", line.data, reading.max_bytes)
    # A file that was being written when a machine crashed can have runs of zero bytes between complete lines.
    data = line.data.strip(b"\0 \t\r")
    try:
        decoded = data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} of the line is not UTF-8: {error.reason}"
        return Reject(place, "not UTF-8", reason, excerpt(line.data))
    if not decoded:
        return None
    try:
        row = parse_record(decoded, control_characters=True)  # the stage `cleaning` removes control characters
    except ValueError as error:
        return Reject(place, "not JSON", str(error), excerpt(decoded))
    if not isinstance(row, dict):
        reason = f"the line holds a value of type {type(row).__name__} instead of a JSON object"
        return Reject(place, "not a JSON object", reason, excerpt(decoded))
    return as_document(row, reading, place=place, record=line.number, position=line.position)


def as_document(row: dict[str, Any], reading: Reading, *, place: str, record: int, position: int) -> Item:
    """Make a document from a JSON object or a row of a table.

    The result is a `Reject` if the text is missing or invalid, and a `Skip` if the text is blank. An invalid URL,
    number of votes or title is left out, and the document is kept.
    """
    text = row.get(reading.text_key)
    if not isinstance(text, str):
        key = reading.text_key
        if text is None:
            rule = "no text"
            reason = f"`{key}` is null" if key in row else f"there is no key `{key}`; the keys are: {_keys(row)}"
        else:
            rule, reason = "text is not a string", f"`{key}` has the type {type(text).__name__} instead of string"
        shown = ", ".join(f"{name}: {value!s:.60}" for name, value in row.items())
        return Reject(place, rule, reason, excerpt(shown))
    if not text or text.isspace():
        return Skip("blank", record)
    if not encodable(text):
        return Reject(place, "lone surrogate", "UTF-8 cannot encode half of a surrogate pair", excerpt(text))
    return Text(
        text,
        record,
        position,
        url=_string(row.get(reading.url_key)),
        karma=_number(row.get(reading.karma_key)),
        title=_string(row.get(reading.title_key)),
    )


def _keys(row: dict[str, Any]) -> str:
    return excerpt(", ".join(row)) or "none"


def _string(value: Any) -> str:
    return value if isinstance(value, str) and encodable(value) else ""


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
