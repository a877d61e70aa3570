"""Split a web archive into records, and find the next record after garbage, a wrong length or damage.

A record consists of a line such as `WARC/1.0`, header lines, a blank line, the content, and two line ends. The header
line `Content-Length` gives the size of the content in bytes. Nothing else marks the end of a record, so a wrong
`Content-Length` hides all later records from a reader that trusts it. This module checks that another record or the end
of a member follows each record.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from crosscut.corpus.readers.archives.headers import BLANK_LINE, split_head
from crosscut.corpus.readers.archives.members import Chunk, Damage, unpack_members
from crosscut.corpus.readers.files import File
from crosscut.data.text.records import DAMAGED, Reject, excerpt

HEAD_BYTES = 64 * 1024
"""Maximum size of a header block in bytes. If the content of a record is too long, only this many bytes of it are
kept."""

_FIRST_LINE = re.compile(rb"WARC/\d+\.\d+\s*?\n")
_NEXT_RECORD = re.compile(rb"\nWARC/\d+\.\d+\s*?\n(?!WARC/\d)")
"""Pattern for the first line of the next record. A first line directly after another one is no header, so a run of
first lines is a single piece of garbage."""
_HEAD_END = re.compile(rb"(%b)|\nWARC/\d+\.\d+\s*?\n" % BLANK_LINE.pattern)
"""Pattern for the end of a header block, or for the next record if that comes first."""
_LONGEST_MARK = 32
_EXCERPT_BYTES = _USUAL_HEAD = 1024
_LINE_ENDS = re.compile(rb"[\r\n]+")
_LENGTH = re.compile(r"\d{1,18}")


class ArchiveRecord(NamedTuple):
    """One record of a web archive."""

    number: int
    """Offset of the record in the file on disk. If several records share a compressed member, the first has the offset
    of the member, and each later record has the number of the previous record plus 1."""

    headers: dict[str, str]
    """Values of the header lines, by name in lower case."""

    content: bytes
    """Content after the header. If the record is longer than allowed, only the first `HEAD_BYTES` bytes."""

    length: int
    """Length of the content in bytes."""

    position: int
    """Number of bytes read from the disk up to the end of this record."""

    @property
    def kind(self) -> str:
        """Type of the record, such as `response`."""
        return self.headers.get("warc-type", "").lower()

    @property
    def place(self) -> str:
        """Position of the record for reports, such as `byte 1024`."""
        return f"byte {self.number}"


def read_records(file: File, max_bytes: int) -> Iterator[ArchiveRecord | Reject]:
    """Yield the records of an archive in order, and a reject for each part that cannot be read.

    The content of a record is held in memory if it has at most `max_bytes` bytes.
    """
    stream = _RecordStream(unpack_members(file))
    splitter = _Splitter(file, stream, max_bytes)
    while (segment := stream.next_segment()) is not None:
        if isinstance(segment, Damage):
            reason = f"the records from byte {segment.start} to byte {segment.end} cannot be read: {segment.reason}"
            yield Reject(f"byte {segment.start}", DAMAGED, reason, lost=max(segment.end - segment.start, 1))
        else:
            yield from splitter.records()


class _RecordStream:
    """Unpacked bytes of an archive, divided into segments.

    A segment begins at a member that begins with a record, so a record never continues in another segment.
    """

    def __init__(self, chunks: Iterator[Chunk | Damage]) -> None:
        self._chunks = chunks
        self._next: Chunk | Damage | None = None
        self._held = bytearray()
        self._is_open = False
        self._member = 0
        self.start = 0
        """Offset on disk of the member with which the segment begins."""
        self.used = 0
        """Number of bytes of the segment that were read so far."""
        self.position = 0
        """Number of bytes read from the disk so far."""

    def next_segment(self) -> Chunk | Damage | None:
        """Move to the next segment, and return its first chunk. Returns a `Damage` instead if a damaged part comes
        next, and None at the end of the file.
        """
        while self._is_open and self._pull():
            self._held.clear()
        found, self._next = self._next or next(self._chunks, None), None
        self._held.clear()
        self._is_open = isinstance(found, Chunk)
        if isinstance(found, Chunk):
            self._held += found.data
            self.start, self.used, self.position = found.member, 0, found.position
            self._member = found.member
        return found

    @property
    def is_damaged(self) -> bool:
        """Whether the remaining bytes of the segment belong to a damaged member."""
        return not self._pull() and isinstance(self._next, Damage) and self._next.start == self._member

    @property
    def is_at_end(self) -> bool:
        """Whether the end of the file has been read."""
        return not self._pull() and self._next is None

    def _pull(self) -> bool:
        """Load another chunk of the segment into memory. Return whether there was one."""
        if self._next is None:
            self._next = next(self._chunks, None)
        if not isinstance(self._next, Chunk) or self._next.begins:
            return False
        self._held += self._next.data
        self.position = self._next.position
        self._member = self._next.member
        self._next = None
        return True

    def peek(self, size: int) -> bytes:
        """Return the next `size` bytes without moving past them. The result is shorter at the end of the segment."""
        return bytes(self._held[: self.load(size)])

    def load(self, size: int) -> int:
        """Load the next `size` bytes into memory. Return their number, which is smaller at the end of the segment."""
        while len(self._held) < size and self._pull():
            pass
        return min(len(self._held), size)

    def find_head(self) -> int:
        """Return the length of the header block that begins here, with the blank line at its end. Returns 0 if the
        bytes are not the header block of a record.
        """
        if not _FIRST_LINE.match(self.peek(_LONGEST_MARK)):
            return 0
        size = self.load(HEAD_BYTES)
        end = BLANK_LINE.search(self._held, 0, _USUAL_HEAD)
        if end and not _NEXT_RECORD.search(self._held, 0, end.start()):
            return end.end()
        end = _HEAD_END.search(self._held, 0, size)
        return end.end() if end and end[1] else 0

    def ends_record(self, size: int) -> bool:
        """Whether a record ends after the next `size` bytes. Garbage after the two line ends is allowed here, because
        it is reported separately.
        """
        has_all = self.load(size + _LONGEST_MARK) >= size
        after = bytes(self._held[size : size + _LONGEST_MARK])
        rest = after.lstrip(b"\r\n")
        if not rest:
            return has_all and not self.is_damaged
        return bool(_FIRST_LINE.match(rest)) or bool(BLANK_LINE.match(after))

    def hides_record(self, size: int) -> bool:
        """Whether a record begins within the next `size` bytes, if no record ends after them."""
        is_cut = self.is_damaged and not self._held[size : size + _LONGEST_MARK].strip(b"\r\n")
        return not is_cut and bool(_NEXT_RECORD.search(self._held, 0, size))

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes and move past them. The result is shorter at the end of the segment."""
        data = self.peek(size)
        self._drop(len(data))
        return data

    def put_back(self, data: bytes) -> None:
        """Put back the bytes that were read last, so that they are read again."""
        self._held[:0] = data
        self.used -= len(data)

    def skip(self, size: int) -> tuple[int, bool]:
        """Skip `size` bytes, or fewer at the end of the segment. Return the number of skipped bytes, and whether a
        record may begin among them.
        """
        left, has_record = size, False
        while left and (self._held or self._pull()):
            step = min(left, len(self._held))
            has_record = has_record or bool(_NEXT_RECORD.search(self._held, 0, step))
            self._drop(step)
            left -= step
        return size - left, has_record

    def skip_line_ends(self) -> None:
        """Move to the next byte that is not a line end."""
        while self._held or self._pull():
            found = _LINE_ENDS.match(self._held)
            if not found:
                return
            self._drop(found.end())

    def skip_to_record(self) -> int:
        """Move to the next record, or to the end of the segment. Return the number of skipped bytes."""
        before = self.used
        while not (found := _NEXT_RECORD.search(self._held)):
            self._drop(max(len(self._held) - _LONGEST_MARK, 0))
            if not self._pull():
                self._drop(len(self._held))
                return self.used - before
        self._drop(found.start() + 1)
        return self.used - before

    def _drop(self, size: int) -> None:
        del self._held[:size]
        self.used += size


class _Splitter:
    """Splitter of segments into records."""

    def __init__(self, file: File, stream: _RecordStream, max_bytes: int) -> None:
        self._file = file
        self._stream = stream
        self._max_bytes = max_bytes
        self._last = -1

    def records(self) -> Iterator[ArchiveRecord | Reject]:
        """Yield the records of the segment that the stream has begun."""
        while True:
            self._stream.skip_line_ends()
            if not self._stream.peek(1):
                return
            number = self._number()
            head = self._stream.read(self._stream.find_head())
            if not head:
                yield from self._garbage(number)
            elif item := self._record(number, head):
                self._last = number
                yield item

    def _number(self) -> int:
        """Number of the record that begins at the current position of the stream."""
        place = self._stream.start if self._file.compression else self._stream.used
        return max(place, self._last + 1)

    def _garbage(self, number: int) -> Iterator[Reject]:
        """Skip bytes that are not a record. Yield a reject, unless the bytes are an incomplete record directly before
        damage.
        """
        left, head = self._stream.load(HEAD_BYTES), self._stream.peek(_EXCERPT_BYTES)
        is_begun = bool(_FIRST_LINE.match(head)) and left < HEAD_BYTES
        self._stream.skip(1)
        size = 1 + self._stream.skip_to_record()
        if is_begun and self._stream.is_damaged:
            return
        if is_begun and size == left and not self._file.compression:
            yield self._broken_off(number, head, "the file ends in the header of a record")
            return
        reason = f"{size:,} bytes are not a record, because the header of a record begins with `WARC/`, has at most "
        reason += f"{HEAD_BYTES:,} bytes, and ends with a blank line"
        yield Reject(f"byte {number}", "no record", reason, excerpt(head[:size]))

    def _broken_off(self, number: int, head: bytes, reason: str) -> Reject:
        return Reject(f"byte {number}", DAMAGED, reason, excerpt(head), lost=max(self._file.size - number, 1))

    def _record(self, number: int, head: bytes) -> ArchiveRecord | Reject | None:
        """Read the content of a record. Return None for a record in the damaged part of a file."""
        _, headers = split_head(head)
        digits = headers.get("content-length", "")
        if not _LENGTH.fullmatch(digits):
            self._stream.skip_to_record()
            reason = f"`Content-Length` must be a number of bytes, but is `{excerpt(digits)}`"
            return Reject(f"byte {number}", "wrong length", reason, excerpt(head))
        length = int(digits)
        reason = f"`Content-Length` of the record is {length:,}, but the record does not end after this many bytes"
        if length <= self._max_bytes and self._stream.ends_record(length):
            return ArchiveRecord(number, headers, self._stream.read(length), length, self._stream.position)
        if length <= self._max_bytes and self._stream.hides_record(length):
            self._stream.skip_to_record()
            return Reject(f"byte {number}", "wrong length", reason, excerpt(head))
        content = self._stream.read(length if length <= self._max_bytes else min(length, HEAD_BYTES))
        skipped, has_record = self._stream.skip(length - len(content))
        found = len(content) + skipped
        if found == length and self._stream.ends_record(0):
            return ArchiveRecord(number, headers, content, length, self._stream.position)
        if self._stream.is_damaged and (found < length or not self._stream.peek(_LONGEST_MARK).strip(b"\r\n")):
            return None
        inner = _NEXT_RECORD.search(content)
        if inner and not skipped:
            self._stream.put_back(content[inner.start() + 1 :])
        elif found == length:
            self._stream.skip_to_record()
        elif inner or has_record:
            return self._broken_off(number, head, f"{reason}, and the next record cannot be found")
        elif not self._file.compression and self._stream.is_at_end:
            reason = f"the file ends in the middle of a record, which should have {length:,} bytes, but has {found:,}"
            return self._broken_off(number, head, reason)
        return Reject(f"byte {number}", "wrong length", reason, excerpt(head))
