"""Division of strings and of files into lines."""

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple


def lines_of(text: str) -> list[str]:
    r"""Split a text into lines, which end in \n or \r\n. The last line may be empty.

    Unlike `str.splitlines`, this function does not split at U+2028, U+0085 and other characters that JSON and prose may
    contain within a line.
    """
    return [line.removesuffix("\r") for line in text.split("\n")]


class Line(NamedTuple):
    """A line of a file."""

    number: int
    """Line number, from 1."""

    data: bytes
    """Bytes of the line without its line end. The data of a line that is too long may be truncated."""

    start: int
    """Offset of the line in the decompressed data, in bytes."""

    position: int
    """Number of bytes read from the disk up to this line."""

    too_long: bool = False
    """Whether the line is longer than the argument `max_bytes` of `read_lines`."""

    unended: bool = False
    """Whether this line is the end of the file and has no line end. The line may then be incomplete."""


def read_lines(chunks: Iterable[tuple[bytes, int]], max_bytes: int = sys.maxsize) -> Iterator[Line]:
    """Yield the lines of a file. The rest of a line longer than `max_bytes` is discarded.

    `chunks` has the bytes of the file, each with the number of bytes read from the disk so far. Their errors pass
    through.
    """
    held: list[bytes] = []
    number, start, length, position = 1, 0, 0, 0
    for chunk, position in chunks:
        first, *rest = chunk.split(b"\n")
        if length <= max_bytes:
            held.append(first)
        length += len(first)
        if not rest:
            continue
        yield Line(number, b"".join(held), start, position, length > max_bytes)
        number, start = number + 1, start + length + 1
        *whole, last = rest
        for data in whole:
            yield Line(number, data, start, position, len(data) > max_bytes)
            number, start = number + 1, start + len(data) + 1
        held, length = [last], len(last)
    if length:
        yield Line(number, b"".join(held), start, position, length > max_bytes, unended=True)
