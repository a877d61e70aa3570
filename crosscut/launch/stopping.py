"""Stop between two steps, at the same step on all ranks, after SIGTERM or SIGUSR1 of a scheduler or a user's Ctrl-C.

A signal reaches ranks at different times, or only some of them. If one rank left alone, the others would wait for it
forever. Ranks therefore vote at every check: an all-reduce (max) of one byte over all ranks, started at one check and
read at the next one, when it has long arrived. The vote uses gloo, host memory and a process group of its own, so it
does not wait for a device and does not block other collectives.

A thread receives the signals, so they are noticed even while the main thread waits inside a collective. If `launch`
started this rank, then `launch` alone decides: it passes a request on as SIGUSR1. A SIGTERM without a following SIGUSR1
means that another rank has failed.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from crosscut.config.terminal import show_cursor

REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler asks a program to stop."""

INTERRUPTIBLE = (*REQUESTS, signal.SIGINT)
"""Signals that ask a program to stop if it also ends in good order on Ctrl-C."""

SAME_REQUEST = 2.0
"""Number of seconds during which further signals count as copies of the first one, because schedulers signal a process
and its group, and torchrun passes signals on. A later SIGTERM ends the process at once, and so does a later SIGINT if
SIGINT is handled.
"""

SAME_INTERRUPT = 0.3
"""The same for a SIGINT that a terminal sends: too short to press Ctrl-C twice, and long enough for a program between
the terminal and this process that passes the signal on.
"""

_UNTIL_PASSED_ON = 2.0
"""Number of seconds within which `launch` passes on a request, if a scheduler sent SIGTERM to all processes."""

_PATIENCE = timedelta(days=1)

_INTERRUPTED = 2
"""Vote of a rank that received a SIGINT. Other ranks vote 1 if they were asked to stop, otherwise 0."""

_T = TypeVar("_T")


class Stopped(Exception):  # noqa: N818 - the name describes an event
    """All ranks have agreed to stop."""


def ignore_requests() -> None:
    """Ignore further stop requests, so that a repeated signal does not change the exit status of a process that is
    ending.

    Schedulers send a request several times: to the process, its group and its children. SIGINT and SIGKILL still end
    the process at once.
    """
    if threading.current_thread() is threading.main_thread():
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Context in which SIGTERM and SIGUSR1 do not end the process, but make `check` raise `Stopped` on all ranks
    together.

    `signals` may name other signals to handle in this way. `told` is called, in a separate thread, when this rank
    receives a request.

    Every rank must enter the context and make the same calls of `check` and `meet` in the same order. Outside the main
    thread, a process cannot handle signals, but it still takes part in the votes. On exit, the signals get their
    previous handlers back. However, if the ranks agreed to stop (`check` raised, or `accept` was called) and no error
    followed, the signals are ignored from then on (`ignore_requests`), because the process is about to end.
    """

    def __init__(self, signals: tuple[int, ...] = REQUESTS, told: Callable[[], None] | None = None) -> None:
        self.asked = False
        """Whether this rank was asked to stop. Other ranks may not know it yet."""
        self.interrupted = False
        """Whether the request is a user's Ctrl-C. After `check` has raised, all ranks have the same value."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.give_back(finished=error is None, ignored=error is None and self._agreed)
        if self._group is not None and error is None:  # after an error, the other ranks may never get here
            self._read_vote()
            dist.destroy_process_group(self._group)

    def check(self) -> None:
        """Raise `Stopped` at the same call on all ranks: at the first check after one in which a rank had a request.

        On a single rank, it is raised at once. Sends one byte to all ranks and waits for the previous call's message.
        """
        if self._group is None:
            agreed = self.asked
        else:
            agreed = self._read_vote()
            if not agreed:
                mine = torch.tensor([self.asked + self.interrupted], dtype=torch.uint8)
                self._vote = (dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True), mine)
        if agreed:
            self._agreed = True
            raise Stopped

    def accept(self) -> None:
        """Note that all ranks stop here, if they agreed on it by other means than `check`."""
        self._agreed = True

    def checked(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items, with a `check` before each one. All ranks must have the same number of items."""
        for item in items:
            self.check()
            yield item

    def meet(self) -> None:
        """Wait until all ranks get here, so that a rank that is still writing can finish."""
        if self._group is not None:
            dist.barrier(self._group)

    def _read_vote(self) -> bool:
        if self._vote is None:
            return False
        (work, result), self._vote = self._vote, None
        work.wait()
        self.interrupted = self.interrupted or result.item() == _INTERRUPTED
        return bool(result.item())

    def _ask(self, number: int) -> None:
        if self.asked:
            return
        self.interrupted, self.asked = number == signal.SIGINT, True
        if self._told is not None:
            self._told()


class _Signals:
    """Receives the process's signals in a thread of its own, instead of Python's main thread."""

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
        """Restore the previous signal handlers or, with `ignored`, ignore the signals.

        Unless `finished`, a SIGTERM that may mean the failure of another rank still ends this process.
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
            return  # the terminal sends it to the launching process, too, which decides
        elif is_repeated(number, now - self._first):
            show_cursor()
            os._exit(128 + number)
        self._ask(number)

    def _leave_unless_passed_on(self) -> None:
        if not self._certain.wait(_UNTIL_PASSED_ON):
            os._exit(128 + signal.SIGTERM)


def is_repeated(number: int, seconds: float) -> bool:
    """Whether a signal that arrives `seconds` after the first request is a second request, and not a copy of the
    first.
    """
    from_terminal = number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ
    return number != signal.SIGUSR1 and seconds > (SAME_INTERRUPT if from_terminal else SAME_REQUEST)


def _do_nothing(*_: object) -> None:
    """Do nothing. Python calls handlers in the main thread when it can; by then, the thread has already seen the
    signal.
    """
