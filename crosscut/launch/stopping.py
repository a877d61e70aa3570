"""Orderly stop: all ranks stop after the same step when a scheduler sends SIGTERM or SIGUSR1, or a user presses Ctrl-C.

A signal may reach some ranks later than others, or not at all. If one rank stopped alone, the other ranks would wait
forever. The ranks therefore vote at every check. A vote is an all-reduce (max) of one byte over all ranks. A check
starts a vote, and the next check reads the result, which has usually arrived by then. Votes use gloo, host memory and a
separate process group, so a vote neither waits for a device nor blocks other collectives.

A thread receives the signals, so a signal is noticed even while the main thread waits inside a collective. If `launch`
started this rank, `launch` passes SIGINT on to the rank as SIGINT, and every other request to stop as SIGUSR1. A
SIGTERM without a following SIGUSR1 then means that another rank has failed, and this rank exits.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from crosscut.config.system.terminal import show_cursor
from crosscut.flight import RECORD, MessageKind
from crosscut.parallel.collectives import recorded_message

REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler asks a program to stop."""

INTERRUPTIBLE = (*REQUESTS, signal.SIGINT)
"""Signals to handle in a program that also stops in an orderly way on Ctrl-C: `REQUESTS` and SIGINT."""

SAME_REQUEST = 2.0
"""Number of seconds after the first signal during which further signals count as copies of the first one. Copies occur
because a scheduler signals both a process and the process's group, and because torchrun passes signals on. A later
SIGTERM (or SIGINT, if the program handles SIGINT) ends the process at once.
"""

SAME_INTERRUPT = 0.3
"""Number of seconds after the first SIGINT during which further SIGINTs count as copies of the first one. Ranks that
torchrun started use `SAME_REQUEST` instead. A user cannot press Ctrl-C twice in this time, but a program between the
terminal and this process can send a copy of the signal.
"""

_UNTIL_PASSED_ON = 2.0
"""Number of seconds that a rank waits, after a SIGTERM, for a SIGUSR1 from `launch`. Without the SIGUSR1, the SIGTERM
was not a request to stop: another rank has failed.
"""

_PATIENCE = timedelta(days=1)

_INTERRUPTED = 2
"""Vote of a rank that received a SIGINT. A rank that was asked to stop in another way votes 1, and all other ranks vote
0.
"""

_ALL_RANKS = "all ranks"
"""Name that the record of messages uses for the group of all ranks, in place of the name of an axis."""

_T = TypeVar("_T")


class Stopped(Exception):  # noqa: N818 - the name describes an event
    """Exception that is raised on all ranks when the ranks have agreed to stop."""


def ignore_requests() -> None:
    """Ignore SIGTERM and SIGUSR1 from now on. Call this function when the process is about to end.

    Schedulers send a request several times: to the process, its group and its children. Without this call, a repeated
    signal could change the exit status of the process. SIGINT and SIGKILL still end the process at once. Outside the
    main thread, the function does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Context in which one signal, sent to any rank, stops all ranks at the same point of the program.

    Call the method `check` at every point at which the ranks may stop, for example after each step. The ranks vote in
    `check`: after a rank has received a signal, `check` raises `Stopped` on every rank. The method `meet` waits until
    every rank has called `meet`. The method `accept` records an agreement to stop that the ranks have reached without a
    vote in `check`.

    The argument `signals` lists the signals to handle (by default SIGTERM and SIGUSR1). The argument `told` is a
    function that a separate thread calls when this rank receives the first of these signals.

    Every rank must enter the context and call `check` and `meet` in the same order. Outside the main thread, Python
    cannot handle signals, but the rank still votes in `check`.

    When the context ends, the previous signal handlers are restored. There is one exception: if the ranks have agreed
    to stop and no error leaves the context, the process is about to end, so it ignores the signals from then on.
    """

    def __init__(self, signals: tuple[int, ...] = REQUESTS, told: Callable[[], None] | None = None) -> None:
        self.asked = False
        """Whether this rank has received a request to stop. The other ranks may not know of the request yet."""
        self.interrupted = False
        """Whether the request to stop was a user's Ctrl-C. All ranks have the same value after `check` has raised
        `Stopped`.
        """
        self._told = told
        self._agreed = False
        self._signals = _Signals(self._ask, signals)
        self._group: dist.ProcessGroup | None = None
        self._vote: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> Self:
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._signals.take()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._signals.give_back(finished=error is None, ignored=error is None and self._agreed)
        if self._group is not None and error is None:  # after an error, the other ranks may never get here
            self._read_vote()
            dist.destroy_process_group(self._group)

    def check(self) -> None:
        """Raise `Stopped` if any rank has received a request to stop. All ranks raise `Stopped` at the same call.

        Each call starts a vote of one byte over all ranks, and waits for the vote of the previous call. `Stopped` is
        therefore raised one call after the first call at which some rank knew of the request. A single rank needs no
        vote, and raises `Stopped` at the first call after the request. Each call counts as progress of this rank
        (`flight.record`).
        """
        RECORD.progress()
        if self._group is None:
            agreed = self.asked
        else:
            agreed = self._read_vote()
            if not agreed:
                mine = torch.tensor([self.asked + self.interrupted], dtype=torch.uint8)
                number = self._record()
                work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True)
                self._vote = (work, mine)
                if number:
                    RECORD.started(number, id(work))
        if agreed:
            self._agreed = True
            raise Stopped

    def accept(self) -> None:
        """Record that all ranks have agreed to stop. Call this method if they have agreed without a vote in `check`.
        The process then ignores signals after the context has ended.
        """
        self._agreed = True

    def checked(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items, and call `check` before each item. All ranks must have the same number of items."""
        for item in items:
            self.check()
            yield item

    def meet(self) -> None:
        """Wait until every rank has called `meet`, so that no rank ends while another rank is still writing."""
        if self._group is not None:
            with recorded_message(MessageKind.BARRIER, self._group, _ALL_RANKS, 0):
                dist.barrier(self._group)

    def _record(self) -> int:
        """Record that this rank is about to start a vote. Return the number of the message, or 0 if no record is
        open.
        """
        if not RECORD.is_open or self._group is None:
            return 0
        group = RECORD.group(self._group.group_name, _ALL_RANKS, lambda _: range(dist.get_world_size()))
        return RECORD.start(MessageKind.VOTE, group, 1)

    def _read_vote(self) -> bool:
        if self._vote is None:
            return False
        (work, result), self._vote = self._vote, None
        number = RECORD.wait(id(work))
        work.wait()
        RECORD.waited(number)
        self.interrupted = self.interrupted or result.item() == _INTERRUPTED
        return bool(result.item())

    def _ask(self, number: int) -> None:
        if self.asked:
            return
        self.interrupted, self.asked = number == signal.SIGINT, True
        if self._told is not None:
            self._told()


class _Signals:
    """Receiver of the process's signals, which runs in a separate thread instead of Python's main thread."""

    def __init__(self, ask: Callable[[int], None], numbers: tuple[int, ...]) -> None:
        self._ask = ask
        self._numbers = numbers
        self._first = 0.0
        self._certain = threading.Event()
        self._handlers: dict[int, object] = {}

    def take(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in self._numbers}
        self._old_descriptor = signal.set_wakeup_fd(self._there.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="signals")
        self._thread.start()

    def give_back(self, *, finished: bool, ignored: bool) -> None:
        """Restore the previous signal handlers. With `ignored`, ignore the signals instead.

        If `finished` is false, a SIGTERM that has already arrived and may report the failure of another rank still ends
        this process.
        """
        if not self._handlers:
            return
        signal.set_wakeup_fd(self._old_descriptor)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if ignored else handler)  # type: ignore[arg-type]  # what it returned
        self._handlers = {}
        if finished:
            self._certain.set()
        self._there.close()  # ends the thread
        self._thread.join()
        self._here.close()

    def _listen(self) -> None:
        while numbers := self._here.recv(64):
            for number in numbers:
                if number in self._numbers:
                    self._take_one(number)

    def _take_one(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self._certain.set()
        is_launched = multiprocessing.parent_process() is not None
        if not self._first:
            self._first = now
            if is_launched and number == signal.SIGTERM:
                threading.Thread(target=self._leave_unless_passed_on, daemon=True).start()
        elif number == signal.SIGINT and is_launched:
            return  # the terminal has also sent SIGINT to the launching process, which decides
        elif is_repeated(number, now - self._first):
            show_cursor()
            os._exit(128 + number)
        self._ask(number)

    def _leave_unless_passed_on(self) -> None:
        if not self._certain.wait(_UNTIL_PASSED_ON):
            os._exit(128 + signal.SIGTERM)


def is_repeated(number: int, seconds: float) -> bool:
    """Whether a signal is a new request, and not a copy of the first request. The signal arrives `seconds` after the
    first request.
    """
    from_terminal = number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ
    return number != signal.SIGUSR1 and seconds > (SAME_INTERRUPT if from_terminal else SAME_REQUEST)


def _do_nothing(*_: object) -> None:
    """Do nothing. The thread of `_Signals` has already seen the signal when Python calls this handler."""
