"""Records of .jsonl files, and the parts that all readers of records share.

Training text and corpora are read by the same readers. A reader never stops at a faulty record: it yields a `Reject`
and continues. A corpus collects the rejects. Training text is read strictly: `Reject.error` of the first reject is
raised, and the reader does not repair a record (`RecordFile.is_strict`).
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from crosscut.config.errors import DamagedDataError, DataError
from crosscut.data.text.json_text import encodable, parse_record
from crosscut.data.text.lines import Line, read_lines
from crosscut.data.text.sources import BrokenOffError, undecodable

EXCERPT_CHARACTERS = 200

DAMAGED = "damaged file"
"""Rule of the rejects for damaged and truncated files."""

_NOT_JSON, _NOT_UTF8 = "not JSON", "not UTF-8"


class Reject(NamedTuple):
    """A record that should be a document but cannot be read."""

    place: str
    """Position in the file, such as `line 17`, `row 3` or `byte 1024`."""

    rule: str
    """Kind of problem in a few fixed words, such as `not JSON`. The report counts rejects by kind."""

    reason: str
    """Details of the problem in this record."""

    excerpt: str = ""
    """First characters of the record, for the report."""

    lost: int = 0
    """Number of bytes on disk that are lost if more than one record is lost, for example after damage in a file. At
    least 1 if the number is unknown, and 0 if only this record is lost."""

    message: str = ""
    """Message of `error`. Empty if the reader is never strict."""

    @property
    def error(self) -> DataError:
        """Error to raise where a file is read strictly: `DamagedDataError` if the reject stands for damage."""
        return (DamagedDataError if self.rule == DAMAGED else DataError)(self.message)


class RawRecord(NamedTuple):
    """A line or a row with its text."""

    text: str
    """Text of the record. It may be blank."""

    number: int
    """Number of the line or row, from 1."""

    position: int
    """Number of bytes read from the disk up to this record."""

    others: Sequence[object] = ()
    """Values of `RecordFile.other_keys`, in the same order. None stands for a missing value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFile:
    """A file of records, and how its records are read."""

    name: str
    """Name of the file in messages."""

    size: int
    """Size in bytes on disk."""

    compression: str
    """Suffix of the compression, or empty."""

    text_key: str
    """Key or column of the text."""

    setting: str = "`data.text_key` (or `evaluation.text_key`)"
    """Option that holds `text_key`, for the messages of a strict reader."""

    other_keys: tuple[str, ...] = ()
    """Keys or columns whose values are read in addition to the text."""

    max_bytes: int = sys.maxsize
    """Maximum size of a line or a text in bytes. A longer one is rejected."""

    is_strict: bool = True
    """Whether the file must follow its format to the letter. Otherwise unescaped control characters in strings, NUL
    characters around a line, and columns of nulls or of dictionary-encoded strings are accepted."""


def read_json_records(file: RecordFile, chunks: Iterable[tuple[bytes, int]]) -> Iterator[RawRecord | Reject]:
    """Read a .jsonl file. Each line is decoded and parsed separately, so a bad line does not affect other records.
    Blank lines are left out.

    `chunks` has the decompressed bytes of the file, each with the number of bytes read from the disk so far. If they
    break off, the incomplete line is lost, and the last item is a reject. For a strict reader, the error passes
    through. Without `is_strict`, a file that ends in the middle of a record also counts as damaged.
    """
    number = 0
    try:
        for line in read_lines(chunks, file.max_bytes):
            number = line.number
            item = _read_line(file, line)
            if line.unended and isinstance(item, Reject) and not file.is_strict:
                item = _ended_early(item)
            if item is not None:
                yield item
    except BrokenOffError as error:
        if file.is_strict:
            raise
        yield broken_off(file.size, error, f"line {number + 1}")


def broken_off(size: int, error: BrokenOffError, what: str) -> Reject:
    """Make the reject for a damaged file of `size` bytes. The reject stands for everything from the damage to the end
    of the file.

    `what` names the first record that cannot be read.
    """
    reason = f"{what} and everything after it cannot be read: {error}"
    return Reject(f"byte {error.place}", DAMAGED, reason, lost=max(size - error.place, 1))


def _ended_early(reject: Reject) -> Reject:
    """Turn the reject of an incomplete last record into the reject of a damaged file. The file was truncated, so more
    records may be lost.
    """
    if reject.rule not in (_NOT_JSON, _NOT_UTF8):
        return reject
    reason = f"the file ends in the middle of a record, and later records may be missing: {reject.reason}"
    return reject._replace(rule=DAMAGED, reason=reason, lost=1)


def _read_line(file: RecordFile, line: Line) -> RawRecord | Reject | None:
    if line.too_long:
        return too_long(f"line {line.number}", "the line", line.data, file.max_bytes)
    # A file that was being written when a machine crashed can have runs of zero bytes between complete lines.
    data = line.data.strip(b" \t\r" if file.is_strict else b"\0 \t\r")
    if not data:
        return None  # the parser would take longer
    if file.is_strict:
        data = line.data
    try:
        decoded = data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} of the line is not UTF-8: {error.reason}"
        message = undecodable(file.name, file.compression, line.start + error.start)
        return Reject(f"line {line.number}", _NOT_UTF8, reason, excerpt(line.data), message=message)
    try:
        values = parse_record(decoded, control_characters=not file.is_strict)
    except ValueError as error:
        if not decoded.strip(" \t\r"):
            return None
        message = f"`{file.name}`, line {line.number}, must be valid JSON, but is not: {error}. "
        message += "Correct or remove the line."
        return Reject(f"line {line.number}", _NOT_JSON, str(error), excerpt(decoded), message=message)
    if not isinstance(values, dict):
        return _no_object(file, values, line.number, decoded)
    text = values.get(file.text_key)
    if not isinstance(text, str):
        return without_text(file, values, f"line {line.number}")
    if not (text.isascii() or encodable(text)):
        return Reject(
            f"line {line.number}",
            "lone surrogate",
            "UTF-8 cannot encode half of a surrogate pair",
            excerpt(text),
            message=f"`{file.name}`, line {line.number}, must hold text that is valid in UTF-8, but has a lone "
            "surrogate. Correct or remove the line.",
        )
    return RawRecord(text, line.number, line.position, list(map(values.get, file.other_keys)))


def _no_object(file: RecordFile, value: object, number: int, line: str) -> Reject:
    kind = type(value).__name__
    reason = f"the line holds a value of type {kind} instead of a JSON object"
    message = (
        f"`{file.name}`, line {number}, must be a JSON object with the text under `{file.text_key}`, but is a {kind}. "
        "Correct or remove the line."
    )
    return Reject(f"line {number}", "not a JSON object", reason, excerpt(line), message=message)


def without_text(file: RecordFile, values: dict[str, object], place: str) -> Reject:
    """Make the reject for a record whose text is missing or not a string. `place` is the line or the row."""
    key, text = file.text_key, values.get(file.text_key)
    keys = ", ".join(values)
    if text is not None:
        rule, reason = "text is not a string", f"`{key}` has the type {type(text).__name__} instead of string"
    elif key in values:
        rule, reason = "no text", f"`{key}` is null"
    else:
        rule, reason = "no text", f"there is no key `{key}`; the keys are: {excerpt(keys) or 'none'}"
    shown = ", ".join(f"{name}: {value!s:.60}" for name, value in values.items())
    but = f"holds {text!r:.60}" if key in values else f"its keys are: {keys or 'none'}"
    message = (
        f"`{file.name}`, {place}, must hold a string under `{key}`, but {but}. Set {file.setting} to the "
        "key of the text."
    )
    return Reject(place, rule, reason, excerpt(shown), message=message)


def excerpt(data: bytes | str) -> str:
    """Return the first characters of bytes or of a text. Characters that UTF-8 cannot encode are replaced."""
    if isinstance(data, str):
        return data[:EXCERPT_CHARACTERS].encode("utf-8", "replace").decode()
    return data[:EXCERPT_CHARACTERS].decode("utf-8", "replace")


def too_long(
    place: str, what: str, start: bytes | str, max_bytes: int, *, limit: str = "`ingest.max_document_mb`"
) -> Reject:
    """Make the reject for a record that is longer than `max_bytes`.

    `what` names the kind of record, such as `the line`. `start` is the beginning of the record. `limit` is the name of
    the limit in the message.
    """
    reason = f"{what} is longer than {max_bytes / 1e6:g} MB ({limit})"
    return Reject(place, "too long", reason, excerpt(start))
