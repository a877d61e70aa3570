"""Budget of processor time and memory for each record that a task reads.

A worker process notes, in memory that it shares with the process that supervises it, which record it reads. It also
asks the kernel to end the worker when the record has used its processor time. The kernel's signal needs no code of this
process, so it also ends a library that is stuck in C. The supervisor then writes the record to the task's list of lost
records, and starts the task again. The second attempt does not read a lost record, and reports it as a reject.

The list is on the disk before the task starts again, and belongs to the task's key. So an interrupted run that is
started again loses the same records.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crosscut.config.system.files import parse_json, read_small, write_whole

SECONDS = 10.0
"""Processor time that every record may take. A machine that is slow or busy needs far less than this."""

SECONDS_PER_BYTE = 20e-6
"""Additional processor time for each byte of a record: 100 times the usual time. The slowest format (mail, Wikipedia or
a page with the careful extraction) usually takes 0.2 µs per byte."""

MEMORY = 3 << 29
"""Memory in bytes that a worker may add while it reads a record, whatever its size. A page of a web archive may be
compressed in its record, and a page of 16 MB takes 1 GB."""

MEMORY_PER_BYTE = 64
"""Additional memory for each byte of a record, in bytes. A page usually takes up to 60 bytes for each of its bytes."""

BYTES_AT_ONCE = 1 << 18
"""Number of bytes between two records, such as damaged data or blank lines, after which the time starts anew."""

NOTE_BYTES = 1 << 16
"""Size of the shared memory for the note. Paths on Linux have at most 4,096 bytes."""

_LENGTH = 4  # bytes of the note that hold its length
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_STATUS_FILE = "/proc/self/statm"
_DATA_FIELD = 5  # pages of private memory that can be written


class Loss(NamedTuple):
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


def read_losses(folder: Path, task: str, key: str) -> list[Loss]:
    """Read the lost records of a task. A list that was written for another key of the task is ignored."""
    try:
        content = parse_json(read_small(folder / losses_name(task)))
        return [Loss(**fields) for fields in content["losses"]] if content["key"] == key else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def add_loss(folder: Path, task: str, key: str, loss: Loss) -> None:
    """Add a record to a task's list of lost records. Raises `OSError` if the list cannot be written."""
    losses = [*read_losses(folder, task, key), loss]
    content = {"key": key, "losses": [one._asdict() for one in losses]}
    write_whole(folder / losses_name(task), json.dumps(content, indent=1) + "\n")


def seconds_for(size: int) -> float:
    """Processor time in seconds that a record of `size` bytes may take."""
    return SECONDS + SECONDS_PER_BYTE * size


def memory_for(size: int) -> int:
    """Memory in bytes that a worker may add while it reads a record of `size` bytes."""
    return MEMORY + MEMORY_PER_BYTE * size


class Watch:
    """Limits on the records of one task. Without a note, nothing is limited, and no record is lost."""

    def __init__(self, note: Any = None, losses: Sequence[Loss] = ()) -> None:
        self._note = memoryview(note).cast("B") if note is not None else None
        self._lost: Mapping[tuple[str, str], Loss] = {(loss.file, loss.place): loss for loss in losses}
        self._file = ""
        self._unread = 0
        self._status = os.open(_STATUS_FILE, os.O_RDONLY) if note is not None and Path(_STATUS_FILE).exists() else -1
        self.num_items = 0
        """Number of items that the reader has yielded for the current file. The reader's caller counts them."""

    def begin_file(self, name: str) -> Loss | None:
        """Begin a file. Returns the loss if an earlier attempt could not read the file to its end."""
        self._file, self.num_items = name, 0
        if self._note is not None:
            self._between(BYTES_AT_ONCE, 0)
        return self._lost.get((name, ""))

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were read outside of a record. Their time starts anew after some of them."""
        if self._note is None:
            return
        self._unread += num_bytes
        if self._unread >= BYTES_AT_ONCE:
            self._between(self._unread, self.num_items)

    def begin(self, place: str, size: int) -> Loss | None:
        """Begin a record. Returns its loss if an earlier attempt could not read the record."""
        if self._lost and (loss := self._lost.get((self._file, place))):
            return loss
        if self._note is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds_for(size))
            self._write(f"{self._file}\0{place}\0{size}")
            self._limit_memory(memory_for(size))
        return None

    def end(self) -> None:
        """End a record."""
        if self._note is not None:
            self._lift_memory()
            self._between(BYTES_AT_ONCE, self.num_items + 1)  # the caller counts the record when it is yielded

    def stop(self) -> None:
        """Lift all limits, because the task is done."""
        if self._note is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._lift_memory()
            os.close(self._status) if self._status >= 0 else None
            self._note = None

    def _between(self, num_bytes: int, num_items: int) -> None:
        self._unread = 0
        signal.setitimer(signal.ITIMER_PROF, seconds_for(num_bytes))  # first, so that no signal ends half a note
        self._write(f"{self._file}\0\0{num_bytes}\0{num_items}")

    def _write(self, text: str) -> None:
        assert self._note is not None
        content = text.encode("utf-8", "surrogatepass")
        self._note[_LENGTH : _LENGTH + len(content)] = content
        self._note[:_LENGTH] = len(content).to_bytes(_LENGTH, "little")

    def _limit_memory(self, more: int) -> None:
        if self._status >= 0:
            used = int(os.pread(self._status, 128, 0).split()[_DATA_FIELD]) * resource.getpagesize()
            _set_data_limit(used + more)

    def _lift_memory(self) -> None:
        if self._status >= 0:
            _set_data_limit(resource.RLIM_INFINITY)


def _set_data_limit(most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY and (most == resource.RLIM_INFINITY or most > hard):
        most = hard
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def clear_note(note: Any) -> None:
    """Note that no record is being read."""
    memoryview(note).cast("B")[:_LENGTH] = bytes(_LENGTH)


def find_loss(note: Any, exit_code: int | None, *, out_of_memory: bool = False) -> Loss | None:
    """Return the loss that ended a worker with this exit code or a lack of memory. Returns None if the worker ended for
    another reason, for example because the whole machine had too little memory.
    """
    content = bytes(memoryview(note).cast("B"))
    text = content[_LENGTH : _LENGTH + int.from_bytes(content[:_LENGTH], "little")].decode("utf-8", "surrogatepass")
    if not text:
        return None
    file, place, size, after = (*text.split("\0"), "0")[:4]
    what = f"the record of {int(size):,} bytes" if place else f"the file after {int(after):,} records"
    if out_of_memory:
        most = f"more than {memory_for(int(size)) >> 20:,} MiB of memory"
        return Loss(file, place, int(after), "took too much memory", f"{what} took {most}") if place else None
    if exit_code == -signal.SIGPROF:
        most = f"more than {seconds_for(int(size)):.1f} s of processor time"
        return Loss(file, place, int(after), "took too long", f"{what} took {most}")
    if exit_code is not None and -exit_code in _CRASHES:
        name = signal.Signals(-exit_code).name
        return Loss(file, place, int(after), "crashed the reader", f"{what} ended the process with {name}")
    return None
