"""Stopping between two steps, on all ranks alike, when a scheduler asks for it by SIGTERM or SIGUSR1.

A signal reaches ranks at different times, or only some of them, and a rank that left by itself would leave the others
waiting. So every look at the request is a vote: an all-reduce (max) of one byte over all ranks, started at one look and
read at the next, when it has long arrived. It goes through gloo, from host memory, in a group of its own: it waits for
no device and stands in no collective's way.

Signals are taken by a thread, which is told of them even while the main thread waits inside a collective. Where
`launch` started this rank it alone decides: it passes a request on as SIGUSR1, and a SIGTERM that none goes with says
that another rank has failed.
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

REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to stop. A program that ends well by Ctrl-C, too, takes SIGINT beside them."""

SAME_REQUEST = 2.0
"""Seconds within which further signals are copies of the first: to a process, to its group, and passed on by torchrun.
A SIGTERM that comes later ends the process at once, as does a SIGINT where it is taken."""

_UNTIL_PASSED_ON = 2.0
"""Seconds in which `launch` passes on the request that a SIGTERM to all processes is."""

_PATIENCE = timedelta(days=1)

_T = TypeVar("_T")


class Stopped(Exception):  # noqa: N818 - it tells what happened
    """All ranks have agreed to stop here."""


def ignore_requests() -> None:
    """Let no further copy of a request change how a process ends that has done what was asked.

    Schedulers send a request several times, and to the process, its group and its children. SIGINT and SIGKILL still
    end it at once.
    """
    if threading.current_thread() is threading.main_thread():
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """A context in which SIGTERM and SIGUSR1 no longer end the process, but make `check` raise on all ranks alike.

    `signals` may name others to take so. `told` is called, in a thread of its own, when this rank is asked.

    Every rank enters it, and calls `check` and `meet` equally often and in the same order. Outside the main thread of a
    process signals cannot be taken, but the votes of other ranks hold. After it both signals do what they did before;
    but where `check` has raised, or `accept` was called, and no error followed, the process is about to end with what
    it has written, and they are ignored from then on (`ignore_requests`).
    """

    def __init__(self, signals: tuple[int, ...] = REQUESTS, told: Callable[[], None] | None = None) -> None:
        self.asked = False
        """Whether this rank was asked to stop; the others may not know of it yet."""
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
        if self._group is not None and error is None:  # after an error the other ranks may not come any more
            self._read_vote()
            dist.destroy_process_group(self._group)

    def check(self) -> None:
        """Raise `Stopped` on all ranks at the same call, the one after that which saw a request on one of them.

        On a single rank it is the same call. Sends one byte to all ranks and waits for what the last call sent.
        """
        if self._group is None:
            agreed = self.asked
        else:
            agreed = self._read_vote()
            if not agreed:
                mine = torch.tensor([self.asked], dtype=torch.uint8)
                self._vote = (dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True), mine)
        if agreed:
            self._agreed = True
            raise Stopped

    def accept(self) -> None:
        """Say that all ranks stop here, which they have agreed on by other means than `check`."""
        self._agreed = True

    def checked(self, items: Iterable[_T]) -> Iterator[_T]:
        """The items, with a `check` before each: for work of many parts, as many on every rank."""
        for item in items:
            self.check()
            yield item

    def meet(self) -> None:
        """Wait until all ranks are here: what one of them was writing is written."""
        if self._group is not None:
            dist.barrier(self._group)

    def _read_vote(self) -> bool:
        if self._vote is None:
            return False
        (work, result), self._vote = self._vote, None
        work.wait()
        return bool(result.item())

    def _ask(self) -> None:
        self.asked = True
        if self._told is not None:
            self._told()


class _Signals:
    """Takes the process's signals from Python's main thread to a thread of its own."""

    def __init__(self, ask: Callable[[], None], numbers: tuple[int, ...]) -> None:
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
        """Let signals do what they did before, or nothing where they are to be `ignored`.

        Unless `finished`, a SIGTERM that may be for a rank that failed still holds.
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
        if not self._first:
            self._first = now
            if multiprocessing.parent_process() is not None and number == signal.SIGTERM:
                threading.Thread(target=self._leave_unless_passed_on, daemon=True).start()
        elif number != signal.SIGUSR1 and now - self._first > SAME_REQUEST:
            os._exit(128 + number)
        self._ask()

    def _leave_unless_passed_on(self) -> None:
        if not self._certain.wait(_UNTIL_PASSED_ON):
            os._exit(128 + signal.SIGTERM)


def _do_nothing(*_: object) -> None:
    """Python calls this in the main thread when it gets there; the thread has been told by then."""
