"""Detection of hangs: a thread in each rank notices when no rank makes progress, and explains the hang.

A rank makes progress when it finishes a step, a batch of a validation pass or a request of an evaluation
(`StopRequest.check`). The longest allowed time without progress, the *bound*, is `max(30 s, 5 x t)`, where t is the
longest of the last 64 times between one sign of progress and the next. During the first two steps, which may compile
the model, the bound is `_FIRST_BOUND`. A rank that writes a checkpoint makes progress as long as it writes bytes.

When the bound has passed, each rank writes its status next to its record: the Python stacks of its threads, and the
last collectives in PyTorch's Flight Recorder. The lowest rank that has written a status then reads the records and
statuses of all ranks, and writes one report. The thread needs no lock that the training code holds. It cannot run while
a library holds Python's global interpreter lock; the report of the other ranks then says that this rank does not
answer.
"""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from crosscut.config.system.deletion import make_folder, remove_file, remove_if_empty
from crosscut.config.system.files import open_own, write_whole
from crosscut.config.system.terminal import echo
from crosscut.flight import RECORD, RunPhase
from crosscut.flight.reading import (
    RankRecord,
    RankStatus,
    files_of_ranks,
    is_here,
    read_records,
    read_statuses,
    read_traces,
    record_path,
    status_path,
    trace_path,
    write_status,
    write_traces,
)
from crosscut.flight.record import RecordWord
from crosscut.flight.report import Hang, describe, examine
from crosscut.flight.stragglers import find_stragglers
from crosscut.launch.flight_recorder import own_traces
from crosscut.logbook.contents import free_hang_report
from crosscut.logbook.rows import append_row
from crosscut.logbook.schema import METRICS_FILE, WATCH_FOLDER

LEAST_BOUND = 30.0
"""Minimum bound in seconds: a run counts as hanging only after at least this time without progress."""
_FACTOR = 5.0
_FIRST_BOUND = 600.0
"""Bound during the first two steps, in seconds."""
_STOP_BOUND = 10.0
"""Bound in seconds for a run that was asked to stop. Schedulers wait for 30 seconds before they kill a run."""
EXIT_HUNG, EXIT_RESTART = 75, 76
"""Exit statuses of a rank that ends its process after a hang, if the run can resume from a checkpoint. With
`EXIT_RESTART`, the rank also asks the launching process to start all ranks again.
"""
_POLL = 1.0
"""Seconds between two checks by the thread."""
_COPY_EVERY = 5.0
"""Seconds between two copies of the record into the run's folder."""
_WINDOW = 60.0
"""Length in seconds of the periods over which the ranks are compared to find stragglers."""
_GRACE = 2.5
"""Maximum number of seconds to wait until all ranks have written their status."""
_WRITING = 1 << 16
"""Number of bytes that a rank must write between two checks to count as writing."""
_REPORTED, _ASKED = "reported", "asked"
"""Names of marker files in the folder `watch`. The first rank that notices a hang creates `asked`, and all ranks then
write their status. The rank that writes the report creates `reported`, so that no other rank writes one.
"""
_STACK_CALLS = 12

_THREADS = ("checkpoint", "batches")
"""Prefixes of the names of the threads whose stacks a status shows, in addition to the main thread."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Reaction:
    """Settings for what a rank does after the report about a hang."""

    ends: bool = False
    """Whether the rank ends its process."""
    restarts: bool = False
    """Whether the rank, when it ends, asks the launching process to start all ranks again."""
    can_resume: Callable[[], bool] = _never
    """Function that returns whether the run can resume from a checkpoint after the ranks have ended."""


class Watch:
    """Context in which this rank records its messages and a thread watches for hangs. `folder` is the run's folder,
    which all ranks must be able to access.

    Every rank must enter the context. When the context ends, this rank's record is removed from the folder.
    """

    def __init__(
        self, folder: Path, device: torch.device, *, least_bound: float = LEAST_BOUND, reaction: Reaction | None = None
    ) -> None:
        self._reaction, self._asked = reaction or Reaction(), _never
        self.run_folder, self.folder, self._device = folder, folder / WATCH_FOLDER, device
        self._least = least_bound
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="hang watch")
        self._has_status = False
        self._next_window, self._before = 0.0, dict[int, RankRecord]()
        self._main = threading.get_ident()
        self._since = time.time_ns()
        self._path: Path | None = None
        """Path of the report about the current hang. None before the report is written."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __enter__(self) -> Self:
        try:
            make_folder(self.run_folder, WATCH_FOLDER)
            self._withdraw()
            RECORD.open(rank=self.rank, world_size=self.world_size, on_device=self._device.type == "cuda")
        except OSError as error:
            why = getattr(error, "told", f"{error}.")
            echo(f"Crosscut cannot explain hangs of this run, because the record cannot be written: {why}", err=True)
            return self
        self._copy()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._thread.is_alive():
            return
        self._ended.set()
        self._thread.join()
        RECORD.close()
        with suppress(OSError):
            remove_file(record_path(self.folder, self.rank))
            self._withdraw()
            remove_if_empty(self.run_folder, WATCH_FOLDER)  # only the last rank finds the folder empty

    def obey(self, asked: Callable[[], bool]) -> None:
        """Make this rank end its process during a hang if `asked()` is true, which means that the run was asked to
        stop.
        """
        self._asked = asked

    @property
    def bound(self) -> float:
        """Time without progress after which the run counts as hanging, in seconds."""
        recent = list(RECORD.recent)
        if RECORD[RecordWord.STEPS] < 2:
            return max(self._least, _FIRST_BOUND if self._least >= LEAST_BOUND else 0.0)
        return max(self._least, _FACTOR * max(recent, default=0) / 1e9)

    def _run(self) -> None:
        """Check the rank's progress repeatedly until the context ends. This method runs in the thread."""
        stalled, done, next_copy, told, was_long = 0.0, -1, 0.0, 0.0, False
        last = time.monotonic()
        written = _bytes_written()
        while not self._ended.wait(min(_POLL, self._least / 4)):
            now = time.monotonic()
            RECORD.beat()
            RECORD[RecordWord.BOUND] = int(self.bound * 1e9)
            if now >= next_copy:
                next_copy = now + _COPY_EVERY
                self._copy()
            if self.rank == 0 and now >= self._next_window:
                self._next_window = now + _WINDOW
                self._tell_stragglers()
            moved = has_progress = RECORD[RecordWord.PROGRESS] != done
            if RECORD[RecordWord.PHASE] == RunPhase.CHECKPOINT:
                before, written = written, _bytes_written()
                moved = moved or written - before > _WRITING
            # After a pause of this process, only the time in which the thread ran counts.
            stalled = 0.0 if moved else stalled + min(now - last, 3 * _POLL)
            was_long = was_long or told > 0 or now - last > 3 * _POLL
            if moved:
                if was_long and has_progress:  # the time of a hang must not raise the bound
                    RECORD.recent.clear()
                    was_long = False
                self._moved(told)
                told, done = 0.0, RECORD[RecordWord.PROGRESS]
            elif self._is_due(stalled, told) and self._explain(stalled):
                told = stalled
                if self._reaction.ends or self._asked():
                    self._end()
            last = now
            RECORD[RecordWord.THREAD] = time.thread_time_ns()
        if told and RECORD[RecordWord.PROGRESS] != done:  # the run went on, and ended before the next check
            self._moved(told)

    def _tell_stragglers(self) -> None:
        """Print the ranks that have been slower than the others since the last call."""
        before, self._before = self._before, read_records(self.folder)
        for straggler in find_stragglers(before, self._before):
            echo(straggler, err=True)

    def _is_due(self, stalled: float, told: float) -> bool:
        """Whether this rank must explain the hang. True if the bound has passed, if another rank has already noticed
        the hang, or if the rank was asked to stop but hangs.
        """
        if stalled > max(self.bound, 2 * told):
            return True
        if self._asked() and stalled > max(min(_STOP_BOUND, self._least), 2 * max(RECORD.recent, default=0) / 1e9):
            return True
        return not told and stalled > _POLL and (self.folder / _ASKED).exists()

    def _end(self) -> None:
        """Wait for the report, kill the ranks on this machine that do not answer, and end this process. The main thread
        cannot end the process, because it waits for a message that does not arrive.
        """
        self._ended.wait(_GRACE)  # the lowest rank writes the report
        statuses = read_statuses(self.folder)
        restarts = self._reaction.restarts and not self._asked() and multiprocessing.parent_process() is not None
        status = (EXIT_RESTART if restarts else EXIT_HUNG) if self._reaction.can_resume() else 1
        if min(statuses, default=self.rank) == self.rank:
            echo("All ranks of this run now end, because the run hangs.", err=True)
            records = read_records(self.folder)
            silent = [record.pid for rank, record in records.items() if rank not in statuses and is_here(record)]
            _kill_later(silent)
        os._exit(status)

    def _moved(self, told: float) -> None:
        """Record that the rank makes progress. After a report, also remove the rank's files about the hang."""
        RECORD[RecordWord.MOVED_AT] = time.time_ns()
        self._path = None
        if told or self._has_status:
            self._has_status = False
            with suppress(OSError):
                self._withdraw()
            if told and self.rank == 0:
                echo("The run continues: all ranks are making progress again.", err=True)

    def _withdraw(self) -> None:
        """Remove the files that this rank has written about a hang, and the marker files."""
        written = (status_path(self.folder, self.rank), trace_path(self.folder, self.rank))
        for path in (*written, self.folder / _REPORTED, self.folder / _ASKED):
            remove_file(path)

    def _copy(self) -> None:
        path = record_path(self.folder, self.rank)
        try:
            RECORD.copy_to(path)
        except OSError:  # the disk is full: leave the rest of the room to the run's own files
            with suppress(OSError):
                remove_file(path)

    def _explain(self, stalled: float) -> bool:
        """Write this rank's status and, if this rank is the lowest one that has written a status, the report. Returns
        false if there is nothing to report, because another rank makes progress or the context has ended.
        """
        self._copy()
        self._has_status = True
        with suppress(OSError):
            open_own(self.folder / _ASKED, "ab").close()
            write_status(self.folder, RankStatus(_stacks(self._main), stalled, self.rank))
            write_traces(self.folder, self.rank, own_traces(self._since))
        deadline = time.monotonic() + min(_GRACE, self._least)
        while self._awaits_others() and time.monotonic() < deadline:
            if self._ended.wait(0.2):
                return False
        statuses = read_statuses(self.folder)
        if min(statuses, default=self.rank) != self.rank:
            return True
        records = read_records(self.folder)
        limit = time.time_ns() - self.bound * 0.5e9
        if any(record.words[RecordWord.MOVED_AT] > limit for record in records.values()):
            return False
        with suppress(OSError):
            (self.folder / _REPORTED).open("x").close()
            traces = read_traces(self.folder)
            self._report(examine(records, statuses, traces, seconds=stalled, bound=self.bound))
        return True

    def _awaits_others(self) -> bool:
        """Whether the status or the trace of any rank is still missing."""
        return any(len(files_of_ranks(self.folder, f"{kind}-*.json")) < self.world_size for kind in ("status", "trace"))

    def _report(self, hang: Hang) -> None:
        """Print the report, and write it to the run's folder and to the metrics. A later report about the same hang
        replaces the earlier one, so the folder has one report for each hang.
        """
        text = describe(hang)
        echo(text, err=True, nl=False)
        path = self._path or free_hang_report(self.run_folder, hang.step)
        write_whole(path, text)
        self._path = path
        row = {"step": hang.step, "hang_seconds": round(hang.seconds, 1), "hang_rank": hang.cause}
        append_row(self.run_folder / METRICS_FILE, row)
        echo(f"This report is also in `{path}`.", err=True)


def _stacks(main: int) -> dict[str, str]:
    """Return the Python stacks of the main thread `main` and, if the rank is reading batches or writing a checkpoint,
    of the threads that do this work.
    """
    names = {main: "main thread"}
    if RECORD[RecordWord.PHASE] in (RunPhase.CHECKPOINT, RunPhase.DATA):
        others = {t.ident: t.name for t in threading.enumerate() if t.name.startswith(_THREADS)}
        names.update({ident: f"thread {name}" for ident, name in others.items() if ident is not None})
    frames = sys._current_frames()
    return {name: _shown(frames[ident]) for ident, name in names.items() if ident in frames}


def _shown(frame: FrameType) -> str:
    """Return the last calls on a thread's stack. Calls inside PyTorch are left out, except the very last call."""
    stack = traceback.extract_stack(frame)
    kept = [call for call in stack[:-1] if f"{os.sep}torch{os.sep}" not in call.filename]
    return "".join(traceback.format_list([*kept[-_STACK_CALLS:], *stack[-1:]]))


def _kill_later(processes: list[int]) -> None:
    """Kill processes one second from now. By then, the launcher has seen that this process has ended. (A process that
    the system has suspended does not react to the launcher's SIGTERM, and the launcher would wait half a minute for
    it.)
    """
    if processes:
        command = f"sleep 1; kill -9 {' '.join(map(str, processes))}"
        subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)  # noqa: S603 - numbers only


def _bytes_written() -> int:
    """Return the number of bytes that this process has written so far, or 0 if the system does not count them."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0
