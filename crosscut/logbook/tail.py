"""Tail of a file of rows: the lines that were added since the last look.

A run appends to its files, and replaces a file by a shorter one when it resumes or rolls back. The tail notices a
replaced file by its inode, by its size, or by its first line, which holds the time at which the file was written anew.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_AT_ONCE = 1 << 20
"""Maximum number of bytes that are read at once."""
_FIRST = 200
"""Number of bytes at the start of a file by which a replaced file is recognised. The first line is shorter."""


class Chunk(NamedTuple):
    """Complete lines of a file."""

    text: str
    is_first: bool
    """Whether the chunk is the beginning of a file: all chunks before it belong to a file that is gone."""


class Tail:
    """Tail of the file at `path`, which need not exist. `longest` is the maximum number of bytes of a line; a longer
    line is cut into pieces that are no rows.
    """

    def __init__(self, path: Path, *, longest: int) -> None:
        self.path, self._longest = path, longest
        self.bytes_read = 0
        """Number of bytes read so far."""
        self._seen: os.stat_result | None = None
        self._beginning = self._half = b""
        self._offset = 0

    def chunks(self) -> Iterator[Chunk]:
        """Yield the lines that were added since the last call. A line without its end is kept until the end arrives.
        If the file has not changed, nothing is read. If the file is gone, yield an empty first chunk.
        """
        seen = _status(self.path)
        if seen is None:
            if self._forget():
                yield Chunk("", True)
            return
        if self._seen is not None and _mark(seen) == _mark(self._seen):
            return
        try:
            file = self.path.open("rb", buffering=0)
        except OSError:
            return
        with file:
            seen = os.fstat(file.fileno())
            is_first = self._is_replaced(file.fileno(), seen)
            if is_first:
                self._forget()
            file.seek(self._offset)
            while data := file.read(_AT_ONCE):
                yield Chunk(self._lines(data), is_first)
                is_first = False
            if is_first:
                yield Chunk("", True)
        self._seen = seen

    def _lines(self, data: bytes) -> str:
        self._beginning = self._beginning or data[:_FIRST]
        self._offset += len(data)
        self.bytes_read += len(data)
        lines, end, half = data.rpartition(b"\n")
        if not end:
            self._half += half
            text = b""
        else:
            text, self._half = self._half + lines + end, half
        if len(self._half) > self._longest:
            self._half = b""
        return text.decode("utf-8", "replace")

    def _is_replaced(self, descriptor: int, seen: os.stat_result) -> bool:
        last = self._seen
        if last is None or (seen.st_dev, seen.st_ino) != (last.st_dev, last.st_ino) or seen.st_size < self._offset:
            return True
        beginning = os.pread(descriptor, len(self._beginning), 0)
        self.bytes_read += len(beginning)
        return beginning != self._beginning

    def _forget(self) -> bool:
        """Start again with the next file. Returns whether there was one."""
        was_there, self._seen = self._seen is not None, None
        self._beginning = self._half = b""
        self._offset = 0
        return was_there


class Whole:
    """File that is read as a whole whenever it has changed."""

    def __init__(self, path: Path, *, most: int = 1 << 26) -> None:
        self.path, self._most = path, most
        self.bytes_read = 0
        self._seen: os.stat_result | None = None

    def changed(self) -> bytes | None:
        """Return the content, or None if the file has not changed since the last call. A file that is missing, too
        large or not regular has no content.
        """
        seen = _status(self.path)
        if seen is None or seen.st_size > self._most:
            was_there, self._seen = self._seen is not None, None
            return b"" if was_there else None
        if self._seen is not None and _mark(seen) == _mark(self._seen):
            return None
        try:
            content = self.path.read_bytes()
        except OSError:
            return None
        self._seen = seen
        self.bytes_read += len(content)
        return content


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a regular file, or None."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _mark(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
