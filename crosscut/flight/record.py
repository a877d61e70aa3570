"""Record of one rank: the most recent messages that the rank has started, and its position in the program.

The record is a block of 64-bit integers in shared memory:

| offset, in integers | content                                                                             |
|---------------------|-------------------------------------------------------------------------------------|
| 0                   | header (`RecordWord`): process, step, phase, place, awaited message, times          |
| 64                  | number of started messages of each process group                                    |
| 128                 | ring of the last 256 messages, with 8 integers for each message                     |
| 2176                | table in JSON: host, process groups with their axes and ranks                       |

A write changes single integers, without a lock and without a system call. On Linux, the memory is a file without a name
(`memfd_create`), which other processes of the user open through `/proc`, even while the rank is stopped. A file on a
disk would not be suitable, because a write to a mapped file can wait for the disk. `Record.copy_to` writes a copy,
which serves other machines and remains after the end of the process.

`RECORD` is the record of this process. It records nothing until `Record.open` is called. It is a module-level variable,
like PyTorch's process groups, because a record cannot be passed to autograd functions and hooks.
"""

import errno
import json
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import TypeVar

from crosscut.config.system.files import open_descriptor
from crosscut.config.system.machine import machine_identity, process_start

MAGIC = 0x315448474C46  # "FLGHT1"
NUM_GROUPS, NUM_MESSAGES, MESSAGE_WORDS = 64, 256, 8
GROUPS = 64
RING = GROUPS + NUM_GROUPS
TABLE = RING + NUM_MESSAGES * MESSAGE_WORDS
TABLE_BYTES = 1 << 16
SIZE = TABLE * 8 + TABLE_BYTES
"""Size of a record, in bytes."""


class RecordWord(IntEnum):
    """Positions of the header's integers. Times are in nanoseconds of the machine's monotonic clock, unless an
    attribute says otherwise.
    """

    MAGIC = 0
    RANK = 1
    WORLD_SIZE = 2
    PID = 3
    DESCRIPTOR = 4
    """File descriptor of this memory in the rank's process, or -1 if there is none."""
    STEP = 5
    PHASE = 6
    PLACE = 7
    PHASE_SINCE = 8
    PROGRESS = 9
    """Number of steps, validation batches and other pieces of work that the rank has finished."""
    PROGRESS_AT = 10
    BEAT = 11
    """Last time at which the watching thread of the rank ran."""
    BEAT_WALL = 12
    """The time of `BEAT` on the wall clock, in nanoseconds since 1970."""
    WAITING = 13
    """Number of the message that the process waits for, or 0 if it waits for no message."""
    WAITING_SINCE = 14
    MESSAGES = 15
    """Number of messages so far, including a message that the rank is just starting."""
    WAITED = 16
    """Total time that the rank has waited for messages in training steps since the process started."""
    SENDING = 17
    """Total time that the rank has spent on starting messages in training steps."""
    STEPS = 18
    """Number of steps since the start of the process."""
    ON_DEVICE = 19
    """1 if collectives run on a GPU, so that the GPU waits for them and not the process."""
    BOUND = 20
    TABLE_BYTES = 21
    OPENED_AT = 22
    MOVED_AT = 23
    """Last time at which the watching thread saw progress, on the wall clock, in nanoseconds since 1970."""
    THREAD = 24
    """CPU time of the watching thread, in nanoseconds."""
    SENDING_SINCE = 25
    SPENT = 32
    """Total time that the rank has spent in the first phase. The times of the other phases follow, in the order of
    `RunPhase`."""


class RunPhase(IntEnum):
    """Phase of the program that a rank is in."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    REDUCTION = 4
    OPTIMIZER = 5
    RESULT = 6
    VALIDATION = 7
    EVALUATION = 8
    COMPARISON = 9
    CHECKPOINT = 10
    END = 11


class ModelPart(IntEnum):
    """Part of the model that a rank is running."""

    NONE = 0
    EMBEDDING = 1
    LAYER = 2
    ATTENTION = 3
    MLP = 4
    HEAD = 5
    ROOT = 6
    """The group of all parameters outside the layers (see `parallel.state.sharding`)."""


class MessageKind(IntEnum):
    """Kind of a message."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    ALL_TO_ALL = 4
    SHIFT = 5
    SEND = 6
    RECEIVE = 7
    VOTE = 8
    OBJECTS = 9
    BARRIER = 10


STARTING, STARTED, DONE = 0, 1, 2
"""States of a message."""

_MESSAGE = struct.Struct("8q")
_WAITING, _WAITING_SINCE, _WAITED = int(RecordWord.WAITING), int(RecordWord.WAITING_SINCE), int(RecordWord.WAITED)
_MESSAGES, _SENDING, _PHASE = int(RecordWord.MESSAGES), int(RecordWord.SENDING), int(RecordWord.PHASE)
_SENDING_SINCE, _SINCE, _RESULT = int(RecordWord.SENDING_SINCE), int(RecordWord.PHASE_SINCE), int(RunPhase.RESULT)
_PLACE, _STEP, _SPENT = int(RecordWord.PLACE), int(RecordWord.STEP), int(RecordWord.SPENT)
_T = TypeVar("_T")
_RECENT = 64
"""Number of recent steps (or other pieces of work) whose times determine when a run counts as hanging."""


@dataclass
class TableGroup:
    """Process group in the table of a record. `ranks` are as `_shortened` returns them."""

    name: str
    axis: str
    ranks: list[int]


@dataclass
class RecordTable:
    """Table of a record, which is stored as JSON."""

    host: str = ""
    machine: str = ""
    process_start: str = ""
    groups: list[TableGroup] = field(default_factory=list)


class Record:
    """Record of this process. All methods return at once, and do nothing before `open` and after `close`."""

    def __init__(self) -> None:
        self.is_open = False
        self._memory: mmap.mmap | None = None
        self._words = memoryview(bytearray(SIZE)).cast("q")
        self._groups: dict[str, int] = {}
        self._table = RecordTable()
        self._awaited: dict[int, int] = {}
        self.recent: deque[int] = deque(maxlen=_RECENT)
        """Times between the most recent calls of `progress`, in nanoseconds."""
        self.on_phase: Callable[[int], None] | None = None
        """Function that is called with each phase that the rank enters, also while no record is open."""

    def open(self, *, rank: int, world_size: int, on_device: bool = False) -> None:
        """Start recording. Raises `OSError` if there is not enough memory."""
        self.close()
        descriptor = -1
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("crosscut-record")
            os.posix_fallocate(descriptor, 0, SIZE)  # otherwise, a write would kill the process if memory is short
        self._memory = mmap.mmap(descriptor, SIZE)
        self._words = memoryview(self._memory).cast("q")
        self._groups, self._awaited = {}, {}
        self.recent.clear()
        now, pid = monotonic_ns(), os.getpid()
        first = {
            RecordWord.RANK: rank,
            RecordWord.WORLD_SIZE: world_size,
            RecordWord.PID: pid,
            RecordWord.DESCRIPTOR: descriptor,
            RecordWord.ON_DEVICE: int(on_device),
            RecordWord.OPENED_AT: now,
            RecordWord.PHASE_SINCE: now,
            RecordWord.PROGRESS_AT: now,
            RecordWord.MAGIC: MAGIC,
        }
        for word, value in first.items():
            self._words[word] = value
        self._table = RecordTable(socket.gethostname(), machine_identity(), process_start(pid) or "")
        self._write_table()
        self.beat()
        self.is_open = True

    def close(self) -> None:
        """Stop recording, and free the memory."""
        self.is_open = False
        if self._memory is None:
            return
        descriptor, words = self._words[RecordWord.DESCRIPTOR], self._words
        self._words = memoryview(bytearray(SIZE)).cast("q")
        words.release()
        self._memory.close()
        self._memory = None
        if descriptor >= 0:
            os.close(descriptor)

    def __getitem__(self, word: RecordWord) -> int:
        return self._words[word]

    def __setitem__(self, word: RecordWord, value: int) -> None:
        self._words[word] = value

    def group(self, name: str, axis: str, ranks: Callable[[str], Sequence[int]]) -> int:
        """Number of the process group `name`. A group that is not in the table is added with its axis and its ranks."""
        number = self._groups.get(name)
        return self.add_group(name, axis, ranks(name)) if number is None else number

    def add_group(self, name: str, axis: str, ranks: Sequence[int]) -> int:
        """Add the process group `name` with its axis and its ranks, and return the group's number. If the table is
        full, all further groups share the last number.
        """
        number = self._groups[name] = min(len(self._groups), NUM_GROUPS - 1)
        if number < NUM_GROUPS - 1:
            self._table.groups.append(TableGroup(name, axis, _shortened(ranks)))
            self._write_table()
        return number

    def start(self, kind: int, group: int, elements: int, place: int = -1) -> int:
        """Record that the rank is about to start a message, and return the message's number. `place` is the place in
        the model that the message belongs to (default: the place that the rank is running).
        """
        words = self._words
        number = words[_MESSAGES] + 1
        row = number % NUM_MESSAGES * MESSAGE_WORDS + RING
        place = (words[_PLACE] if place < 0 else place) << 8 | words[_PHASE]
        count = words[GROUPS + group] + 1
        _MESSAGE.pack_into(words, row * 8, number, group, count, kind, elements, words[_STEP], place, STARTING)
        words[_MESSAGES] = number
        words[_SENDING_SINCE] = monotonic_ns()
        return number

    def started(self, number: int, key: int = 0) -> None:
        """Record that the message `number` has been started. `key` identifies the message in a later call of `wait`."""
        words = self._words
        row = number % NUM_MESSAGES * MESSAGE_WORDS + RING
        words[row + 7] = STARTED
        if words[_PHASE] <= _RESULT:
            words[_SENDING] += monotonic_ns() - words[_SENDING_SINCE]
        words[GROUPS + words[row + 1]] = words[row + 2]  # only now: a rank may be stopped while it starts a message
        self._awaited[key] = number

    def wait(self, key: int) -> int:
        """Record that the process now waits for the message that was started with `key`. Return the message's number,
        or 0 if the message is unknown.
        """
        number = self._awaited.pop(key, 0)
        words = self._words
        words[_WAITING_SINCE] = monotonic_ns()
        words[_WAITING] = number
        return number

    def waited(self, number: int) -> None:
        """Record that the awaited message has arrived."""
        words = self._words
        words[_WAITING] = 0
        if words[_PHASE] <= _RESULT:
            words[_WAITED] += monotonic_ns() - words[_WAITING_SINCE]
        if number:
            words[number % NUM_MESSAGES * MESSAGE_WORDS + RING + 7] = DONE

    def at(self, place: int, *_: object) -> None:
        """Record the place in the model that the rank is running: a `ModelPart` plus 256 times the number of the layer.
        The method can also serve as a gradient hook, and ignores the gradient.
        """
        self._words[_PLACE] = place

    @property
    def place(self) -> int:
        """Place in the model that the rank is running."""
        return self._words[_PLACE]

    def phase(self, phase: int, step: int = -1) -> None:
        """Record that the rank enters a phase of the program, and the step if it is given. Steps are counted from 0."""
        if self.on_phase is not None:
            self.on_phase(phase)
        if not self.is_open:
            return
        words, now = self._words, monotonic_ns()
        words[_SPENT + words[_PHASE]] += now - words[_SINCE]
        words[_SINCE], words[_PHASE], words[_PLACE] = now, phase, 0
        if step >= 0:
            words[_STEP] = step

    def progress(self, *, is_step: bool = False) -> None:
        """Record that the rank has finished a step or another piece of work."""
        if not self.is_open:
            return
        words, now = self._words, monotonic_ns()
        self.recent.append(now - words[RecordWord.PROGRESS_AT])
        words[RecordWord.PROGRESS_AT] = now
        words[RecordWord.PROGRESS] += 1
        words[RecordWord.STEPS] += is_step

    def counted(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items, and record progress before each item."""
        for item in items:
            self.progress()
            yield item

    def beat(self) -> None:
        """Record that the watching thread is running."""
        self._words[RecordWord.BEAT], self._words[RecordWord.BEAT_WALL] = monotonic_ns(), time_ns()

    def copy_to(self, path: Path) -> None:
        """Write a copy of the record to `path`. Raises `OSError` if the copy cannot be written, or if `path` is a
        link.
        """
        content = bytes(memoryview(self._words).cast("B")[: TABLE * 8 + self._words[RecordWord.TABLE_BYTES]])
        descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT)
        try:
            if os.pwrite(descriptor, content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write_table(self) -> None:
        while len(text := json.dumps(asdict(self._table)).encode()) > TABLE_BYTES:
            # with irregular groups of very many ranks
            max(self._table.groups, key=lambda group: len(group.ranks)).ranks = []
        memoryview(self._words).cast("B")[TABLE * 8 : TABLE * 8 + len(text)] = text
        self._words[RecordWord.TABLE_BYTES] = len(text)


def _shortened(ranks: Sequence[int]) -> list[int]:
    """Shorten the ranks of a group to [first, end, stride, -1] if they are evenly spaced. Otherwise, return them
    unchanged.
    """
    if len(ranks) > 2:
        evenly = range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]))
        if list(evenly) == list(ranks):
            return [evenly.start, evenly.stop, evenly.step, -1]
    return list(ranks)


RECORD = Record()
"""Record of this process."""
