"""Exchange between the clients' thread, which handles requests, and the computing thread, which runs the model.

The clients' thread calls `submit` with the texts of a request and gets a `Job`, an asynchronous iterator over the
results: the tokens of each generated text, or one embedding per text. The clients' thread calls `withdraw` when the
client no longer waits for the job. The computing thread calls `take` to collect the changes since the last step; if
there is nothing else to do, `take` waits. The computing thread then calls `began` and `deliver` to report the results.
The clients' thread writes to one queue, which the computing thread reads. The computing thread schedules calls in the
clients' event loop, usually one per step. All other state belongs to one of the two threads.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, count, islice, takewhile
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from crosscut.serving.news import News, Order
from crosscut.serving.protocol.refusals import Refusal, failure_of

MOST_WAITING = 8192
"""Maximum number of texts that wait for a free row of the cache."""

_SHARE = 16
"""A request may take at most 1 / `_SHARE` of the server's free places for texts, but always at least one place. Large
requests therefore leave room for small ones: a request for one text is refused only if no place is free.
"""

MOST_BEGUN = 8192
"""Maximum total number of prompt tokens in the texts that start together between two steps. A longer text starts alone.
The running texts wait while new texts start."""

MOST_EMBEDDED = 1 << 16
"""Maximum number of texts that wait to be embedded. One request may hold up to 2,048 texts, as in OpenAI's API."""

MOST_EMBEDDED_BEGUN = 1 << 17
"""Maximum total number of tokens in the texts that the embedder accepts together between two steps. The limit is high
because the embedder only checks the token ids of a text to accept it, which takes little time."""

MOST_UNREAD = 4096
"""Maximum number of tokens that have been generated for a request, but not yet read by its client."""

HEARTBEAT = 30.0
"""Interval in seconds at which the first rank of an idle server sends the other ranks a sign of life."""

GRACE = 30.0
"""Time in seconds that running texts have to finish after the server is asked to stop."""


class Part(Protocol):
    """Part of the answer to one text, such as a token (`generation.Piece`) or an embedding."""

    @property
    def number(self) -> int:
        """Number of the text that this part belongs to, as assigned by the decoder or the embedder."""

    @property
    def finish(self) -> str:
        """Reason why the text ends with this part. Empty if the text continues."""

    @property
    def error(self) -> Exception | None:
        """Error that ended the text. None if there was no error."""


PartT = TypeVar("PartT", bound=Part)


class Job(Generic[PartT]):
    """Texts of one request. Iteration yields pairs (index of the text, part of its answer) until all texts have
    ended.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = tuple(keys)
        self.pieces: asyncio.Queue[tuple[int, PartT] | Refusal] = asyncio.Queue()
        self._num_open = len(keys)

    def __aiter__(self) -> "Job[PartT]":
        return self

    async def __anext__(self) -> tuple[int, PartT]:
        """Wait for the next part of an answer. Raises `Refusal` if a text fails, if the client reads too slowly, or if
        the server stops before the texts are complete.
        """
        if not self._num_open:
            raise StopAsyncIteration
        told = await self.pieces.get()
        if isinstance(told, Refusal):
            raise told
        self._num_open -= bool(told[1].finish)
        return told


class Desk(Generic[PartT]):
    """Exchange of texts and answers between the two threads of one server. The server works on `num_rows` texts at the
    same time, and `most_waiting` more texts may wait. The texts that start together between two steps have at most
    `most_begun` tokens in total; a longer text starts alone. `grace` is the time in seconds that running texts have to
    finish after a call of `stop`.
    """

    def __init__(
        self, num_rows: int, *, most_waiting: int = MOST_WAITING, most_begun: int = MOST_BEGUN, grace: float = GRACE
    ) -> None:
        self.num_rows = num_rows
        self._most_waiting, self._most_begun = most_waiting, most_begun
        self._grace = grace
        self._stopped_at: float | None = None
        self._inbox: SimpleQueue[tuple[int, Order] | int | None] = SimpleQueue()
        """Queue to the computing thread. An item is an order (a text to start) with its key, the key of a withdrawn
        text, or None to wake the thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keys = count()
        self._jobs: dict[int, tuple[Job[PartT], int]] = {}
        """Maps the key of each unfinished text to the text's job and to the index of the text within this job. Belongs
        to the clients' thread.
        """
        self._arrived: dict[int, Order] = {}
        """Orders (texts to start) that have arrived but not begun, by key. Belongs to the computing thread."""
        self._beginning: list[int] = []
        self._numbers: dict[int, int] = {}
        """Maps the key of each text to the number that the decoder or the embedder gave the text. Belongs to the
        computing thread.
        """
        self._known: dict[int, int] = {}
        """Inverse of `_numbers`: maps the number of each text to the text's key. Belongs to the computing thread."""

    def stop(self) -> None:
        """Refuse new requests from now on. The server stops when all accepted requests are answered or the grace time
        is over. May be called from any thread.
        """
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self._inbox.put(None)

    def open(self) -> None:
        """Register the current thread and its event loop as those of the clients' thread."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused. May be called from any thread."""
        return self._stopped_at is not None

    @property
    def num_running(self) -> int:
        """Number of texts that occupy a row of the cache. Called from the clients' thread."""
        return min(self.num_rows, len(self._jobs))

    @property
    def num_waiting(self) -> int:
        """Number of texts that wait for a row. Called from the clients' thread."""
        return len(self._jobs) - self.num_running

    def submit(self, orders: Sequence[Order]) -> Job[PartT]:
        """Submit texts, either all of them or none. Called from the clients' thread.

        Raises `Refusal` if too many texts are waiting or if the server is about to stop.
        """
        if self.is_stopping:
            raise Refusal("The server is about to stop and accepts no new requests.", status=503, code="stopping")
        num_free = self.num_rows + self._most_waiting - len(self._jobs)
        most = min(num_free, max(1, num_free // _SHARE))
        if len(orders) > most:
            raise Refusal(
                f"A request must have at most {most} texts at the moment, but has {len(orders)}. One request may take "
                f"only a part of the server's free places ({num_free}). Try again later, or send fewer texts at once.",
                status=503,
                code="overloaded",
                retry=True,
            )
        job: Job[PartT] = Job([next(self._keys) for _ in orders])
        for which, (key, order) in enumerate(zip(job.keys, orders, strict=True)):
            self._jobs[key] = (job, which)
            self._inbox.put((key, order))
        return job

    def withdraw(self, job: Job[PartT]) -> None:
        """Cancel all texts of a job that have not ended. Called from the clients' thread."""
        for key in job.keys:
            if self._jobs.pop(key, None) is not None:
                self._inbox.put(key)

    def take(self, *, idle: bool) -> News | None:
        """Return the changes since the last step, or None if nothing has changed. `idle` says whether the model has no
        texts to work on. If so, the call waits up to `HEARTBEAT` seconds for changes. Only the computing thread calls
        this.
        """
        cancelled = []
        for came in self._arrivals(wait=idle and not self._arrived and not self.is_stopping):
            if isinstance(came, tuple):
                self._arrived[came[0]] = came[1]
            elif came is not None and self._arrived.pop(came, None) is None:  # the order has already begun
                cancelled.append(came)
        end = self._is_over(idle=idle and not self._arrived)
        orders = self._next_orders()
        self._beginning = list(orders)
        if not (orders or cancelled or end):
            return None
        return News(tuple(orders.values()), tuple(self._forget(key) for key in cancelled if key in self._numbers), end)

    def _next_orders(self) -> dict[int, Order]:
        """Choose the texts that begin now, first come first served. Remove them from the arrived texts, and return them
        by key.
        """
        sizes = accumulate(len(order.prompt) for order in self._arrived.values())
        num_next = max(1, sum(1 for _ in takewhile(lambda size: size <= self._most_begun, sizes)))
        return {key: self._arrived.pop(key) for key in list(islice(self._arrived, num_next))}

    def began(self, begun: Sequence[int | Exception]) -> None:
        """Report to the desk which texts from the last `take` have begun. `begun` holds one entry per text, in the
        order in which `take` returned them: the number that the decoder or the embedder gave to the text, or the error
        that kept the text from beginning. Only the computing thread calls this.
        """
        for key, outcome in zip(self._beginning, begun, strict=True):
            if isinstance(outcome, Exception):
                self._call(self._refuse, key, failure_of(outcome))
            else:
                self._numbers[key], self._known[outcome] = outcome, key

    def deliver(self, pieces: Sequence[PartT]) -> None:
        """Send each part of an answer to the job that waits for it. If a text ended with an error, its whole job fails.
        Only the computing thread calls this.
        """
        keyed = [(self._known[piece.number], piece) for piece in pieces]
        for key, piece in keyed:
            if piece.finish:
                self._forget(key)
            if piece.error is not None:
                self._call(self._refuse, key, failure_of(piece.error))
        self._call(self._hand_out, [(key, piece) for key, piece in keyed if piece.error is None])

    def close(self) -> None:
        """Refuse all unfinished jobs. The computing thread calls this after its last step, or if the clients' thread
        has ended before its loop began.
        """
        if self._loop is not None:
            self._call(self._turn_away)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the clients' loop is closed because their thread has ended
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
        why = Refusal("The server stopped before the text was complete.", status=503, code="stopping")
        for job in {job for job, _ in self._jobs.values()}:
            job.pieces.put_nowait(why)
        self._jobs.clear()

    def _hand_out(self, keyed: Sequence[tuple[int, PartT]]) -> None:
        for key, piece in keyed:
            if key in self._jobs:
                job, which = self._jobs[key]
                if job.pieces.qsize() == MOST_UNREAD:
                    self._refuse(key, _unread())
                    continue
                job.pieces.put_nowait((which, piece))
                if piece.finish:
                    del self._jobs[key]

    def _refuse(self, key: int, why: Refusal) -> None:
        """End the job of a text with a refusal. The refusal replaces the pieces that the client has not read."""
        if key in self._jobs:
            job, _ = self._jobs[key]
            self.withdraw(job)
            while not job.pieces.empty():
                job.pieces.get_nowait()
            job.pieces.put_nowait(why)


def _unread() -> Refusal:
    return Refusal(
        f"The client must read its stream as fast as the model writes, but {MOST_UNREAD} tokens are unread. Request "
        "fewer texts at once.",
        status=503,
        code="unread",
    )
