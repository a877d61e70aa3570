"""Between the thread that talks to clients and the thread that computes.

Clients' thread: `submit` hands in the texts of a request and gives a `Job`, an asynchronous iterator of their pieces;
`withdraw` says that nobody waits for it any more. Computing thread: `take` collects what has come since the last step,
waiting where there is nothing else to do; `began` and `deliver` tell what became of it. One queue leads in and one call
a step leads out; all else belongs to one of the two threads.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from crosscut.generation import Piece
from crosscut.serving.refusals import Refusal
from crosscut.serving.requests import Order

MOST_WAITING = 1000
"""Texts that may wait for a row."""

HEARTBEAT = 30.0
"""Seconds after which a server without work tells the other ranks that it is still there."""

GRACE = 30.0
"""Seconds that texts have to end when the server is to stop."""


@dataclass(frozen=True)
class News:
    """News for all ranks before a step."""

    orders: tuple[Order, ...] = ()
    """Texts to begin."""
    cancelled: tuple[int, ...] = ()
    """The decoder's numbers of texts to forget."""
    end: bool = False
    """Whether there are no more steps."""


class Job:
    """The texts of one request as they are written: iterate for (which of them, piece) until the last has ended."""

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = tuple(keys)
        self.pieces: asyncio.Queue[tuple[int, Piece] | Refusal] = asyncio.Queue()
        self._num_open = len(keys)

    def __aiter__(self) -> "Job":
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        """Raises `Refusal` where the server ends before the texts do."""
        if not self._num_open:
            raise StopAsyncIteration
        told = await self.pieces.get()
        if isinstance(told, Refusal):
            raise told
        self._num_open -= bool(told[1].finish)
        return told


class Desk:
    """One for a server, which writes `num_rows` texts at once and lets `most_waiting` more wait."""

    def __init__(self, num_rows: int, *, most_waiting: int = MOST_WAITING, grace: float = GRACE) -> None:
        self.num_rows = num_rows
        self._most_waiting = most_waiting
        self._grace = grace
        self._stopped_at: float | None = None
        self._inbox: SimpleQueue[tuple[int, Order] | int | None] = SimpleQueue()
        """Orders with their keys, keys of those that nobody waits for, and None to wake the other thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keys = itertools.count()
        self._jobs: dict[int, tuple[Job, int]] = {}
        """Clients' thread: of each text that is waited for its job, and which of the job's it is."""
        self._beginning: list[int] = []
        self._numbers: dict[int, int] = {}
        """Computing thread: the decoder's number of each text."""
        self._known: dict[int, int] = {}
        """Computing thread: the key of each of the decoder's numbers."""

    def stop(self) -> None:
        """Take no new requests; end when those that are here are answered, or the grace time is over. Any thread."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self._inbox.put(None)

    def open(self) -> None:
        """Say that this thread is the clients', and its event loop theirs."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are not taken any more. Any thread."""
        return self._stopped_at is not None

    @property
    def num_running(self) -> int:
        """Texts that have a row. Clients' thread."""
        return min(self.num_rows, len(self._jobs))

    @property
    def num_waiting(self) -> int:
        """Texts that wait for a row. Clients' thread."""
        return len(self._jobs) - self.num_running

    def submit(self, orders: Sequence[Order]) -> Job:
        """Hand texts in, all or none. Clients' thread.

        Raises `Refusal` where too many wait already, or where the server is about to stop.
        """
        if self.is_stopping:
            raise Refusal("The server is about to stop and takes no new requests.", status=503, code="stopping")
        if len(self._jobs) + len(orders) > self.num_rows + self._most_waiting:
            raise Refusal(
                f"At most {self._most_waiting} texts may wait, but {self.num_waiting} do and {len(orders)} more are "
                "asked for. Try again later.",
                status=503,
                code="overloaded",
                retry=True,
            )
        job = Job([next(self._keys) for _ in orders])
        for which, (key, order) in enumerate(zip(job.keys, orders, strict=True)):
            self._jobs[key] = (job, which)
            self._inbox.put((key, order))
        return job

    def withdraw(self, job: Job) -> None:
        """Give up those of a job's texts that have not ended. Clients' thread."""
        for key in job.keys:
            if self._jobs.pop(key, None) is not None:
                self._inbox.put(key)

    def take(self, *, idle: bool) -> News | None:
        """Take the news, None without any; waits for news where the decoder is `idle`. Computing thread."""
        orders: dict[int, Order] = {}
        cancelled = []
        for came in self._arrivals(wait=idle and not self.is_stopping):
            if isinstance(came, tuple):
                orders[came[0]] = came[1]
            elif came is not None and orders.pop(came, None) is None:  # else it is given up before it began
                cancelled.append(came)
        self._beginning = list(orders)
        end = self._is_over(idle=idle and not orders)
        if not (orders or cancelled or end):
            return None
        return News(tuple(orders.values()), tuple(self._forget(key) for key in cancelled if key in self._numbers), end)

    def began(self, numbers: Sequence[int]) -> None:
        """The decoder's numbers of the orders that were taken last. Computing thread."""
        for key, number in zip(self._beginning, numbers, strict=True):
            self._numbers[key], self._known[number] = number, key

    def deliver(self, pieces: Sequence[Piece]) -> None:
        """Send pieces to those who wait for them. Computing thread."""
        keyed = [(self._known[piece.number], piece) for piece in pieces]
        for key, piece in keyed:
            if piece.finish:
                self._forget(key)
        self._call(self._hand_out, keyed)

    def close(self) -> None:
        """Tell all who still wait that they wait in vain. Computing thread, after its last step."""
        self._call(self._turn_away)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the clients' loop is closed: their thread has ended, and asked to stop
            self._loop.call_soon_threadsafe(function, *arguments)

    def _arrivals(self, *, wait: bool) -> Iterator[tuple[int, Order] | int | None]:
        try:
            yield self._inbox.get(block=wait, timeout=HEARTBEAT)
            while True:
                yield self._inbox.get_nowait()
        except Empty:
            return

    def _forget(self, key: int) -> int:
        number = self._numbers.pop(key)
        del self._known[number]
        return number

    def _is_over(self, *, idle: bool) -> bool:
        return self._stopped_at is not None and (idle or time.monotonic() > self._stopped_at + self._grace)

    def _turn_away(self) -> None:
        why = Refusal("The server has stopped before the text was complete.", status=503, code="stopping")
        for job in {job for job, _ in self._jobs.values()}:
            job.pieces.put_nowait(why)
        self._jobs.clear()

    def _hand_out(self, keyed: Sequence[tuple[int, Piece]]) -> None:
        for key, piece in keyed:
            if key in self._jobs:
                job, which = self._jobs[key]
                job.pieces.put_nowait((which, piece))
                if piece.finish:
                    del self._jobs[key]
