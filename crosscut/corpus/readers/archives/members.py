"""Unpack a web archive member by member.

A crawl compresses each record on its own, so that a record can be read without the records before it. A compressed file
is then a sequence of members (gzip members or zstd frames). After damage, a reader can continue at the start of the
next member. Files that are compressed as a whole are read too.
"""

from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from crosscut.corpus.execution.budget import RecordWatch
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.steps import Steps, TooComplexError
from crosscut.data.text.sources import CHUNK_BYTES, DECOMPRESSORS, PACKED_BYTES, Decompressor, unreadable, zstd_with

RECORD = b"WARC/"
"""First bytes of every record."""

_MAGIC = {".gz": b"\x1f\x8b\x08", ".zst": b"\x28\xb5\x2f\xfd"}
"""First bytes of a member, by compression. The search for the next member after damage looks for these bytes."""

_TRIAL_BYTES = 256 * 1024
"""Number of compressed bytes that must suffice to unpack the first bytes of a member."""

_TRIALS_PER_BYTE, _TRIALS = 16, 16 << 20
"""Number of bytes that may be unpacked to search for members after damage: for each byte of the file, and besides. If
the search takes more, the rest of the file counts as damaged."""

_DICTIONARY = b"\x5d\x2a\x4d\x18"
"""First bytes of a .zst archive that begins with the dictionary for its frames."""

_MAX_DICTIONARY = 64 << 20


class Chunk(NamedTuple):
    """Some unpacked bytes of an archive."""

    data: bytes

    position: int
    """Number of bytes read from the disk so far."""

    member: int
    """Offset on disk of the member that holds the bytes. 0 for a file that is not compressed."""

    begins: bool
    """Whether these bytes are the start of a member and also the start of a record."""


class Damage(NamedTuple):
    """A part of a compressed file that cannot be unpacked."""

    start: int
    """Offset on disk of the damaged member."""

    end: int
    """Offset on disk of the next readable member, or the size of the file if there is none."""

    reason: str


def unpack_members(file: File) -> Iterator[Chunk | Damage]:
    """Yield the unpacked bytes of an archive in order. The first chunk after damage begins a record.

    Raises `DataError` if the operating system cannot read the file.
    """
    with file.open() as opened:
        stream = _MemberStream(opened, file.watch)
        try:
            if file.compression:
                yield from _Members(stream, file).chunks()
            else:
                yield from _plain(stream)
        except OSError as error:
            raise unreadable(file.url, error) from None


class _MemberStream(NamedTuple):
    """An open file whose bytes are counted when they are read."""

    file: IO[bytes]
    watch: RecordWatch

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.watch.advance(len(data))
        return data


def _plain(stream: _MemberStream) -> Iterator[Chunk]:
    position = 0
    while data := stream.read(CHUNK_BYTES):
        position += len(data)
        yield Chunk(data, position, 0, position == len(data))


class _Members:
    """Members of a compressed file, read one after another."""

    def __init__(self, stream: _MemberStream, file: File) -> None:
        self._stream = stream
        self._compression = file.compression
        self._trials = Steps("the search for the next record", file.size, per_unit=_TRIALS_PER_BYTE, at_least=_TRIALS)
        self._held = b""  # packed bytes, of which the first `_used` are used up
        self._used = 0
        self._mark: int | None = (
            None  # start of the member in `_held`, until the first bytes of the member are unpacked
        )
        self._position = 0  # bytes read from the disk
        self._new: Callable[[], Decompressor]
        self._error: type[Exception]

    @property
    def _offset(self) -> int:
        return self._position - len(self._held) + self._used

    def chunks(self) -> Iterator[Chunk | Damage]:
        self._new, self._error = self._find_decompressor()
        if not self._peek(1):
            yield Damage(0, 0, f"the {self._compression} file is empty")
        while self._peek(1):
            yield from self._member()

    def _find_decompressor(self) -> tuple[Callable[[], Decompressor], type[Exception]]:
        head = self._peek(8)
        size = int.from_bytes(head[4:], "little")
        if self._compression != ".zst" or not head.startswith(_DICTIONARY) or size > _MAX_DICTIONARY:
            return DECOMPRESSORS[self._compression]()
        dictionary = self._peek(8 + size)[8:]
        if dictionary.startswith(_MAGIC[".zst"]):
            dictionary = self._unpack_dictionary(dictionary)
        return zstd_with(dictionary)

    def _unpack_dictionary(self, packed: bytes) -> bytes:
        new, damaged = DECOMPRESSORS[".zst"]()
        unpacker, found = new(), b""
        try:
            for piece in _pieces(packed):
                found += unpacker.decompress(piece)
                if unpacker.eof or len(found) > _MAX_DICTIONARY:
                    break
        except damaged:
            pass  # the frames that need the dictionary are reported as damaged
        return found

    def _member(self) -> Iterator[Chunk | Damage]:
        start, lead, is_open = self._offset, b"", False
        self._mark = self._used
        unpacker = self._new()
        while not unpacker.eof:
            packed = self._take()
            try:
                if not packed:
                    raise EOFError(f"the {self._compression} data is truncated at byte {self._offset}")
                data = lead + unpacker.decompress(packed)
            except (EOFError, self._error) as error:
                near = self._offset - len(packed)
                self._used = self._mark if self._mark is not None else self._used - len(packed)
                self._resume(start)
                damage = f"the {self._compression} data is damaged near byte {near}: {error}"
                yield Damage(start, self._offset, str(error) if isinstance(error, EOFError) else damage)
                return
            if not is_open and len(data) < len(RECORD) and not unpacker.eof:
                lead = data
            elif data:
                yield Chunk(data, self._offset, start, not is_open and data.startswith(RECORD))
                lead, is_open, self._mark = b"", True, None
        self._used -= len(unpacker.unused_data)

    def _resume(self, damaged: int) -> None:
        """Move to the next member that begins with a record, or to the end of the file."""
        magic = _MAGIC.get(self._compression)
        self._used += self._offset == damaged and bool(self._peek(1))  # else the damaged member would be found again
        while self._load(_TRIAL_BYTES):
            place = self._held.find(magic, self._used) if magic and self._trials.left else -1
            if place < 0:
                kept = len(magic) - 1 if magic else 0
                self._used = max(len(self._held) - kept, self._used + 1)
            elif place > self._used:
                self._used = place
            elif self._begins_record():
                return
            else:
                self._used += 1

    def _begins_record(self) -> bool:
        unpacker, lead = self._new(), b""
        try:
            for start in range(self._used, min(self._used + _TRIAL_BYTES, len(self._held)), PACKED_BYTES):
                self._trials.take(PACKED_BYTES)
                lead += unpacker.decompress(self._held[start : start + PACKED_BYTES])
                if len(lead) >= len(RECORD) or unpacker.eof:
                    break
        except (self._error, TooComplexError):
            return False
        return lead.startswith(RECORD)

    def _take(self) -> bytes:
        """Return the next packed bytes, at most `PACKED_BYTES`. The result is empty at the end of the file."""
        if self._used == len(self._held):
            more = self._stream.read(CHUNK_BYTES)
            if self._mark is not None and self._used - self._mark > _TRIAL_BYTES:
                self._mark = None
            kept = self._used if self._mark is None else self._mark
            self._held, self._used = self._held[kept:] + more, self._used - kept
            self._mark = None if self._mark is None else 0
            self._position += len(more)
        packed = self._held[self._used : self._used + PACKED_BYTES]
        self._used += len(packed)
        return packed

    def _peek(self, size: int) -> bytes:
        """Return the next `size` packed bytes without using them up. The result is shorter at the end of the file."""
        available = self._load(size)
        return self._held[self._used : self._used + available]

    def _load(self, size: int) -> int:
        """Load the next `size` packed bytes. Return their number, which is smaller at the end of the file."""
        missing = size - len(self._held) + self._used
        if missing > 0 and (more := self._stream.read(max(missing, CHUNK_BYTES))):
            self._held, self._used = self._held[self._used :] + more, 0
            self._position += len(more)
        return min(len(self._held) - self._used, size)


def _pieces(packed: bytes) -> Iterator[bytes]:
    return (packed[start : start + PACKED_BYTES] for start in range(0, len(packed), PACKED_BYTES))
