"""Read the records of all ranks of a run. The readers are the watching thread of each rank and `crosscut doctor`."""

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from crosscut.config.system.files import load_json, parse_json, too_large, write_whole
from crosscut.config.system.machine import machine_identity, process_start
from crosscut.config.system.records import from_json
from crosscut.flight.record import (
    DONE,
    GROUPS,
    MAGIC,
    MESSAGE_WORDS,
    NUM_GROUPS,
    NUM_MESSAGES,
    RING,
    SIZE,
    STARTING,
    TABLE,
    MessageKind,
    RecordTable,
    RecordWord,
    RunPhase,
)
from crosscut.flight.traces import Trace, parse_traces

_LEAST = TABLE * 8
_MOST_WORLD = 1 << 20
"""Largest number of ranks in a record: ten times the ranks of the largest runs."""
_MOST_BYTES = 1 << 24
"""Largest status or trace that is read. A status has the stacks of one process."""


class Group(NamedTuple):
    """Process group that a rank belongs to."""

    name: str
    axis: str
    ranks: range | frozenset[int]
    started: int
    """Number of messages that the rank has started in the group."""


@dataclass(frozen=True, order=True)
class RankMessage:
    """Message (a collective, a send or a receive) in the record of one rank."""

    number: int
    """Number of the message among all messages of the rank, from 1."""
    group: str
    axis: str
    count: int
    """Number of the message among the rank's messages in the group, from 1. The members of a group must start the same
    messages in the same order."""
    kind: MessageKind
    elements: int
    step: int
    phase: RunPhase
    place: int
    state: int
    """`STARTING`, `STARTED` or `DONE`."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Record of one rank at the time of reading."""

    rank: int
    world_size: int
    pid: int
    host: str
    machine: str
    process_start: str
    step: int
    """Step that the rank is running, counted from 0."""
    phase: RunPhase
    place: int
    groups: dict[str, Group]
    messages: dict[int, RankMessage]
    """Most recent messages, keyed by number."""
    awaited: RankMessage | None = None
    """Message that the process waits for."""
    waits_for_device: bool = False
    """Whether collectives run on a GPU. The GPU then waits for them. `awaited` is then None, except while the process
    itself waits, for example for the ranks' vote on stopping."""
    words: tuple[int, ...] = ()
    """Integers of the header (`record.RecordWord`)."""

    def message(self, group: str, count: int) -> RankMessage | None:
        """Return the message with the number `count` in a group, or None if the rank has not started it or the record
        has already overwritten it.
        """
        return next((m for m in self.messages.values() if m.group == group and m.count == count), None)

    def since(self, word: RecordWord, now: int) -> float:
        """Return the seconds from the time stored in `word` to `now`. `now` is in nanoseconds on the monotonic clock of
        the rank's machine.
        """
        return (now - self.words[word]) / 1e9


@dataclass(frozen=True)
class RankStatus:
    """Status that a rank writes during a hang."""

    stacks: Mapping[str, str]
    """Python stacks of the rank's threads, keyed by the name of the thread."""
    seconds: float
    """Time without progress, in seconds."""
    rank: int


class Process(Enum):
    """State of a rank's process."""

    RUNS = "runs"
    STOPPED = "stopped"
    BLOCKED = "blocked"
    """The process is in a system call that cannot be interrupted."""
    GONE = "gone"
    UNKNOWN = "unknown"
    """The process is on another machine, or its state cannot be read."""


def record_path(folder: Path, rank: int) -> Path:
    """Path of the copy of a rank's record, in the folder `watch` of a run."""
    return folder / f"rank-{rank:05d}"


def status_path(folder: Path, rank: int) -> Path:
    """Path of the file in which a rank describes itself during a hang."""
    return folder / f"status-{rank:05d}.json"


def trace_path(folder: Path, rank: int) -> Path:
    """Path of the file in which a rank summarizes PyTorch's Flight Recorder during a hang."""
    return folder / f"trace-{rank:05d}.json"


def files_of_ranks(folder: Path, pattern: str) -> list[Path]:
    """Files of the folder `watch`, by name. Empty if the folder cannot be listed: a process that has reached the limit
    on open files goes on, and the next look may succeed.
    """
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def read_records(folder: Path) -> dict[int, RankRecord]:
    """Read the records of all ranks, keyed by rank. `folder` is the folder `watch` of a run. The record of a rank on
    this machine is read from the rank's memory, and any other record from its copy in the folder. Files that are not a
    record are left out. If the run had more ranks when it was started earlier, the surplus ranks are left out too.
    """
    found: dict[int, RankRecord] = {}
    for path in files_of_ranks(folder, "rank-*"):
        with suppress(OSError, ValueError):
            record = parse_record(_content(path))
            found[record.rank] = parse_record(live) if (live := _memory(record)) else record
    newest = max(found.values(), key=lambda record: record.words[RecordWord.BEAT_WALL], default=None)
    return {rank: record for rank, record in found.items() if newest is not None and rank < newest.world_size}


def parse_record(content: bytes) -> RankRecord:
    """Read a record from its bytes. Raises `ValueError` if the bytes are not a record."""
    if len(content) < _LEAST:
        raise ValueError("too short")
    words = struct.unpack(f"{TABLE}q", content[:_LEAST])
    if words[RecordWord.MAGIC] != MAGIC:
        raise ValueError("not a record")
    table = from_json(RecordTable, parse_json(content[_LEAST : _LEAST + words[RecordWord.TABLE_BYTES]]))
    if len(table.groups) > NUM_GROUPS:
        raise ValueError("too many groups")
    world_size = words[RecordWord.WORLD_SIZE]
    if not 0 <= words[RecordWord.RANK] < world_size <= _MOST_WORLD:
        raise ValueError("no rank of a world")
    groups = [
        Group(group.name, group.axis, _ranks(group.ranks, world_size), words[GROUPS + number])
        for number, group in enumerate(table.groups)
    ]
    messages = {message.number: message for row in range(NUM_MESSAGES) if (message := _message(words, row, groups))}
    return RankRecord(
        rank=words[RecordWord.RANK],
        world_size=world_size,
        pid=words[RecordWord.PID],
        host=table.host,
        machine=table.machine,
        process_start=table.process_start,
        step=words[RecordWord.STEP],
        phase=RunPhase(words[RecordWord.PHASE]),
        place=words[RecordWord.PLACE],
        groups={group.name: group for group in groups},
        messages=messages,
        awaited=messages.get(words[RecordWord.WAITING]),
        waits_for_device=bool(words[RecordWord.ON_DEVICE]),
        words=words[:GROUPS],
    )


def _message(words: tuple[int, ...], row: int, groups: list[Group]) -> RankMessage | None:
    """Read the message in a row of the ring. Returns None if the row is empty, or if the message's group is not in the
    table.
    """
    begin = RING + row * MESSAGE_WORDS
    number, group, count, kind, elements, step, place, state = words[begin : begin + MESSAGE_WORDS]
    if not number or not 0 <= group < len(groups) or not STARTING <= state <= DONE:
        return None
    name, axis, *_ = groups[group]
    return RankMessage(
        number, name, axis, count, MessageKind(kind), elements, step, RunPhase(place & 255), place >> 8, state
    )


def _ranks(ranks: list[int], world_size: int) -> range | frozenset[int]:
    """Ranks of a group, from their form in the table (`record._shortened`). Raises `ValueError` unless they are ranks
    of the world.
    """
    found: range | frozenset[int]
    if len(ranks) == 4 and ranks[3] == -1:
        evenly = range(*ranks[:3])
        found, ends = evenly, [evenly[0], evenly[-1]] if evenly else []
    else:
        found = frozenset(ranks)
        ends = [min(found), max(found)] if found else []
    if any(not 0 <= end < world_size for end in ends):
        raise ValueError("no ranks of the world")
    return found


def is_here(record: RankRecord) -> bool:
    """Whether the rank runs on this machine, so that its process id is valid here."""
    return record.machine == machine_identity()


def process_of(record: RankRecord) -> Process:
    """State of a rank's process."""
    if not is_here(record):
        return Process.UNKNOWN
    started = process_start(record.pid)
    if started is None or (started and record.process_start and started != record.process_start):
        return Process.GONE
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return Process.UNKNOWN
    states = {"T": Process.STOPPED, "t": Process.STOPPED, "D": Process.BLOCKED}
    return states.get(stat.rpartition(")")[2].split()[0], Process.RUNS)


def read_statuses(folder: Path) -> dict[int, RankStatus]:
    """Read the statuses that ranks have written during a hang, keyed by rank."""
    found = {}
    for path in files_of_ranks(folder, "status-*.json"):
        with suppress(OSError, ValueError):
            status = from_json(RankStatus, _read_json(path))
            found[status.rank] = status
    return found


def write_status(folder: Path, status: RankStatus) -> None:
    """Write the status of a rank atomically."""
    write_whole(status_path(folder, status.rank), json.dumps(asdict(status)))


def read_traces(folder: Path) -> dict[int, list[Trace]]:
    """Read the traces that ranks took from PyTorch's Flight Recorder during a hang, keyed by rank. Ranks without traces
    are left out.
    """
    found = {}
    for path in files_of_ranks(folder, "trace-*.json"):
        with suppress(OSError, ValueError):
            if traces := parse_traces(_read_json(path)):
                found[int(path.stem.removeprefix("trace-"))] = traces
    return found


def write_traces(folder: Path, rank: int, traces: list[Trace]) -> None:
    """Write the traces that a rank took from PyTorch's Flight Recorder. The file is written atomically."""
    write_whole(trace_path(folder, rank), json.dumps(traces))


def _read_json(path: Path) -> object:
    if path.stat().st_size > _MOST_BYTES:
        raise too_large(str(path), _MOST_BYTES)
    return load_json(path)


def outside_stack(record: RankRecord) -> str:
    """Python stack of a rank on this machine, read by py-spy from outside the process. Empty if py-spy is not installed
    or fails.
    """
    program = shutil.which("py-spy")
    if program is None or not is_here(record):
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(record.pid)]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout  # noqa: S603
    return ""


def _content(path: Path, flags: int = os.O_NOFOLLOW) -> bytes:
    """Content of a record's file. By default, a link is not read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        return os.read(descriptor, SIZE)
    finally:
        os.close(descriptor)


def _memory(record: RankRecord) -> bytes:
    """Read the record of a rank on this machine from the rank's memory. Returns no bytes if the memory cannot be
    read.
    """
    descriptor = record.words[RecordWord.DESCRIPTOR]
    if descriptor < 0 or process_of(record) is Process.GONE or not is_here(record):
        return b""
    with suppress(OSError):
        return _content(Path(f"/proc/{record.pid}/fd/{descriptor}"), flags=0)
    return b""
