"""A file's lines and a file as a whole, held in bounded memory, and what is left of a file that breaks off."""

from collections.abc import Iterator
from typing import NamedTuple

from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Reject, too_long
from crosscut.data.sources import DamagedError


class Line(NamedTuple):
    """A line of a file."""

    number: int
    """From 1."""

    data: bytes
    """Without its end; the first bytes of one that is too long."""

    position: int
    """Bytes on disk of the file that had been read by then."""

    too_long: bool = False
    """Whether it is longer than was asked for."""


def read_lines(file: File, max_bytes: int) -> Iterator[Line | Reject]:
    """The lines of a file; of one with more than `max_bytes` the rest is read and forgotten.

    When packed data is damaged or ends too early, the line that it breaks off in is lost, and a reject comes last.
    """
    held: list[bytes] = []
    number, length, position = 1, 0, 0

    def line() -> Line:
        return Line(number, b"".join(held), position, length > max_bytes)

    try:
        for chunk, position in file.chunks():
            first, *rest = chunk.split(b"\n")
            if length <= max_bytes:
                held.append(first)
            length += len(first)
            if not rest:
                continue
            yield line()
            *whole, last = rest
            for data in whole:
                number += 1
                yield Line(number, data, position, len(data) > max_bytes)
            number, held, length = number + 1, [last], len(last)
        if length:
            yield line()
    except DamagedError as error:
        yield broken_off(file, error, f"line {number}")


def read_whole(file: File, max_bytes: int) -> bytes | Reject:
    """All of a file that is one document; a reject when it has more than `max_bytes`, or cannot be read to its end."""
    held, length = [], 0
    try:
        for chunk, _ in file.chunks():
            held.append(chunk)
            length += len(chunk)
            if length > max_bytes:
                return too_long("byte 0", "the file", held[0], max_bytes)
    except DamagedError as error:
        return broken_off(file, error, "the file")
    return b"".join(held)


def broken_off(file: File, error: DamagedError, what: str) -> Reject:
    """The reject for all that comes after the place where a file is damaged or ends too early."""
    reason = f"{what} and all after it cannot be read: {error}"
    return Reject(f"byte {error.place}", "damaged file", reason, lost=max(file.size - error.place, 1))
