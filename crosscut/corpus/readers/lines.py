"""Read a file line by line or as a whole, in bounded memory, even if the file is damaged or ends too early."""

from collections.abc import Iterator
from typing import NamedTuple

from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Reject, too_long
from crosscut.data.text.sources import BrokenOffError


class Line(NamedTuple):
    """A line of a file."""

    number: int
    """Line number, from 1."""

    data: bytes
    """Bytes of the line without its line end. The data of a line that is too long may be truncated."""

    position: int
    """Number of bytes read from the disk up to this line."""

    too_long: bool = False
    """Whether the line is longer than the argument `max_bytes` of `read_lines`."""

    unended: bool = False
    """Whether this line is the end of the file and has no line end. The line may then be incomplete."""


def read_lines(file: File, max_bytes: int) -> Iterator[Line | Reject]:
    """Yield the lines of a file. The rest of a line longer than `max_bytes` is discarded.

    If compressed data is damaged or ends too early, the incomplete line is lost, and the last item is a reject.
    """
    held: list[bytes] = []
    number, length, position = 1, 0, 0

    def line(*, unended: bool = False) -> Line:
        return Line(number, b"".join(held), position, length > max_bytes, unended)

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
            yield line(unended=True)
    except BrokenOffError as error:
        yield broken_off(file, error, f"line {number}")


def read_whole(file: File, max_bytes: int) -> bytes | Reject:
    """Read all bytes of a file. Return a reject if the file is longer than `max_bytes` or damaged."""
    held, length = [], 0
    try:
        for chunk, _ in file.chunks():
            held.append(chunk)
            length += len(chunk)
            if length > max_bytes:
                return too_long("byte 0", "the file", held[0], max_bytes)
    except BrokenOffError as error:
        return broken_off(file, error, "the file")
    return b"".join(held)


def broken_off(file: File, error: BrokenOffError, what: str) -> Reject:
    """Make the reject for a damaged file. The reject stands for everything from the damage to the end of the file.

    `what` names the first record that cannot be read.
    """
    reason = f"{what} and everything after it cannot be read: {error}"
    return Reject(f"byte {error.place}", "damaged file", reason, lost=max(file.size - error.place, 1))
