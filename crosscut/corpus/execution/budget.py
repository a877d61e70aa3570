"""Budget of processor time and memory for each record that a task reads.

A worker process notes, in memory that it shares with the process that supervises it, which record it reads. It also
asks the kernel to end the worker when the record has used its processor time. The kernel's signal needs no code of this
process, so it also ends a library that is stuck in C. The supervisor then writes the record to the task's list of lost
records, and starts the task again. The second attempt does not read a lost record, and reports it as a reject.

The list is on the disk before the task starts again, and belongs to the task's key. So an interrupted run that is
started again loses the same records.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from crosscut.config.system.files import parse_json, read_small, write_json
from crosscut.config.system.records import from_json

SECONDS = 10.0
"""Processor time that every record may take. A machine that is slow or busy needs far less than this."""

SECONDS_PER_BYTE = 20e-6
"""Additional processor time for each byte of a record: 100 times the usual time. The slowest format (mail, Wikipedia or
a page with the careful extraction) usually takes 0.2 µs per byte."""

MEMORY = 3 << 29
"""Memory in bytes that a worker may add while it reads a record, whatever its size. A page of a web archive may be
compressed in its record, and a page of 16 MB takes 1 GB."""

MEMORY_PER_BYTE = 64
"""Additional memory for each byte of a record, in bytes. A usual page takes up to 60 bytes for each of its bytes."""

SMALL = 1 << 18
"""Size in bytes up to which records share their limits (see `RecordWatch`)."""

GRACE = 1.0
"""Seconds after which the limits of small records are set anew."""

Note = ctypes.Array[ctypes.c_ubyte]
"""Shared memory for the note."""

NOTE_BYTES = 1 << 16
"""Size of the shared memory for the note. Paths on Linux have at most 4,096 bytes."""

_NOTE = struct.Struct("=QQQ64sQ")
"""Start of the note: whether a record is being read, its size, the items before the rest of the file if no record is
being read, the place of the record, such as `message 17`, and the length of the name of the file, which follows."""

_RECORD = struct.Struct("=QQQ64s")
"""The part of the note that changes with each record. One call writes it, because records may be short."""

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_STATUS_FILE = "/proc/self/statm"
_DATA_FIELD = 5  # pages of private memory that can be written


class LostRecord(NamedTuple):
    """A record that exceeded its budget, or the rest of a file, if the time passed between two records."""

    file: str
    """Name of the file as in ids: `source/file`."""

    place: str
    """Position of the record in the file, or empty if the rest of the file is lost."""

    after: int
    """Number of items that the reader yielded before the rest of the file. 0 if `place` is not empty."""

    rule: str
    """Name of the rule, such as `took too long`."""

    reason: str


def losses_name(task: str) -> str:
    """Name of the file with the records that a task has lost."""
    return f"{task}.losses"


def read_losses(folder: Path, task: str, key: str) -> list[LostRecord]:
    """Read the lost records of a task. A list that was written for another key of the task is ignored."""
    try:
        content = parse_json(read_small(folder / losses_name(task)))
        return list(from_json(tuple[LostRecord, ...], content["losses"])) if content["key"] == key else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def is_list_of_losses(path: Path) -> bool:
    """Whether a file is a task's list of lost records."""
    try:
        content = parse_json(read_small(path))
        return isinstance(content, dict) and content.keys() == {"key", "losses"}
    except (OSError, ValueError):
        return False


def add_loss(folder: Path, task: str, key: str, loss: LostRecord) -> None:
    """Add a record to a task's list of lost records. Raises `OSError` if the list cannot be written."""
    losses = [*read_losses(folder, task, key), loss]
    content = {"key": key, "losses": [one._asdict() for one in losses]}
    write_json(folder / losses_name(task), content, indent=1)


def seconds_for(size: int) -> float:
    """Processor time in seconds that a record of `size` bytes may take."""
    return SECONDS + SECONDS_PER_BYTE * size


def memory_for(size: int) -> int:
    """Memory in bytes that a worker may add while it reads a record of `size` bytes."""
    return MEMORY + MEMORY_PER_BYTE * size


class RecordWatch:
    """Limits on the records of one task. Without a note, nothing is limited, and no record is lost.

    System calls cost more than a short record. The limits are therefore set anew for large records, and otherwise only
    after `GRACE` seconds. So each record has at least its own budget, and at most `GRACE` seconds and the budget of a
    record of `SMALL` bytes.
    """

    def __init__(self, note: Note | None = None, losses: Sequence[LostRecord] = ()) -> None:
        self._lost: Mapping[tuple[str, str], LostRecord] = {(loss.file, loss.place): loss for loss in losses}
        self._is_limited = note is not None
        self._file = ""
        self._armed = -GRACE
        self._is_large = False
        self.num_items = 0
        """Number of items that the reader has yielded for the current file. The reader's caller counts them."""
        if note is not None:
            self._note = memoryview(note).cast("B")
            self._is_reading = self._note[:8].cast("Q")
            self._status = os.open(_STATUS_FILE, os.O_RDONLY) if Path(_STATUS_FILE).exists() else -1
            self._hard = resource.getrlimit(resource.RLIMIT_DATA)[1]

    def begin_file(self, name: str) -> LostRecord | None:
        """Begin a file. Returns the loss if an earlier attempt could not read the file to its end."""
        self._file, self.num_items = name, 0
        if self._is_limited:
            self._allow(0)
            content = name.encode("utf-8", "surrogatepass")
            self._note[_NOTE.size :][: len(content)] = content
            _NOTE.pack_into(self._note, 0, 0, 0, 0, b"", len(content))
        return self._lost.get((name, ""))

    def advance(self, num_bytes: int) -> None:
        """Count bytes that are read or written outside of a record, such as compressed data. Their time starts anew."""
        if self._is_limited:
            self._allow(num_bytes)

    def begin(self, place: str, size: int) -> LostRecord | None:
        """Begin a record. Returns its loss if an earlier attempt could not read the record."""
        if self._lost and (loss := self._lost.get((self._file, place))):
            return loss
        if self._is_limited:
            if size > SMALL or self._is_large or time.monotonic() - self._armed >= GRACE:
                self._allow(size)
            # The caller counts the record only when it is yielded.
            _RECORD.pack_into(self._note, 0, 1, size, self.num_items + 1, place.encode())
        return None

    def end(self) -> None:
        """End a record."""
        if self._is_limited:
            self._is_reading[0] = 0

    def stop(self) -> None:
        """Lift all limits, because all records are read."""
        if self._is_limited:
            self._is_limited = False
            clear_note(self._note)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if self._status >= 0:
                resource.setrlimit(resource.RLIMIT_DATA, (self._hard, self._hard))
                os.close(self._status)

    def _allow(self, size: int) -> None:
        """Set the limits for a record of `size` bytes, unless the present limits leave enough."""
        now = time.monotonic()
        if size <= SMALL and not self._is_large and now - self._armed < GRACE:
            return
        self._armed, self._is_large = now, size > SMALL
        signal.setitimer(signal.ITIMER_PROF, seconds_for(max(size, SMALL)) + GRACE)
        if self._status >= 0:
            used = int(os.pread(self._status, 128, 0).split()[_DATA_FIELD]) * resource.getpagesize()
            most = used + memory_for(max(size, SMALL))
            if self._hard == resource.RLIM_INFINITY or most < self._hard:
                resource.setrlimit(resource.RLIMIT_DATA, (most, self._hard))


def clear_note(note: Note | memoryview) -> None:
    """Note that no record is being read."""
    memoryview(note).cast("B")[: _NOTE.size] = bytes(_NOTE.size)


def find_loss(note: Note, exit_code: int | None, *, out_of_memory: bool = False) -> LostRecord | None:
    """Return the loss that ended a worker with this exit code or a lack of memory. Returns None if the worker ended for
    another reason, for example because the whole machine had too little memory.
    """
    whole = memoryview(note).cast("B")
    is_record, size, after, padded, length = _NOTE.unpack_from(whole)
    if not length:
        return None
    file = bytes(whole[_NOTE.size :][:length]).decode("utf-8", "surrogatepass")
    place = padded.rstrip(b"\0").decode()
    what = f"the record of {size:,} bytes"
    if out_of_memory and not is_record:
        return None  # the task needs memory for other things, too
    if not is_record:
        place, size, what = "", 0, f"the file after {after:,} records"
    ended = _describe_end(size, exit_code, out_of_memory=out_of_memory)
    return LostRecord(file, place, 0 if place else after, ended[0], f"{what} {ended[1]}") if ended else None


def _describe_end(size: int, exit_code: int | None, *, out_of_memory: bool) -> tuple[str, str] | None:
    if out_of_memory:
        return "took too much memory", f"took more than {memory_for(size) >> 20:,} MiB of memory"
    if exit_code == -signal.SIGPROF:
        return "took too long", f"took more than {seconds_for(size):.1f} s of processor time"
    if exit_code is not None and -exit_code in _CRASHES:
        return "crashed the reader", f"ended the process with {signal.Signals(-exit_code).name}"
    return None
