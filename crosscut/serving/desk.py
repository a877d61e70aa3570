"""Exchange between the clients' thread, which handles requests, and the computing thread, which runs the model.

The clients' thread calls `Desk.submit` with the texts of a request and gets a `Submission`, an asynchronous iterator
over the results: the tokens of each generated text, or one embedding per text. It calls `Desk.withdraw` when the client
no longer waits for the results. The desk writes to one queue, from which the computing thread's `Scheduler` reads. The
scheduler schedules calls of the desk in the clients' event loop, usually one per step. All other state belongs to one
of the two threads.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from crosscut.evaluation.embeddings.embedder import Embedded
from crosscut.generation import Piece
from crosscut.serving.news import TextOrder
from crosscut.serving.protocol.refusals import Refusal

MOST_WAITING = 8192
"""Maximum number of texts that wait for a free row of the cache."""

_SHARE = 16
"""A request may take at most 1 / `_SHARE` of the server's free places for texts, but always at least one place. Large
requests therefore leave room for small ones: a request for one text is refused only if no place is free.
"""

MOST_EMBEDDED = 1 << 16
"""Maximum number of texts that wait to be embedded. One request may hold up to 2,048 texts, as in OpenAI's API."""

MOST_UNREAD = 4096
"""Maximum number of tokens that have been generated for a request, but not yet read by its client."""


PartT = TypeVar("PartT", Piece, Embedded)
"""Part of the answer to one text: a token or an embedding."""


class RequestJob(Generic[PartT]):
    """Texts of one request. Iteration yields pairs (index of the text, part of its answer) until all texts have
    ended. At most `most_unread` parts wait to be read.
    """

    def __init__(self, keys: Sequence[int], most_unread: int) -> None:
        self.keys, self.most_unread = tuple(keys), most_unread
        self.pieces: asyncio.Queue[tuple[int, PartT] | Refusal] = asyncio.Queue()
        self._num_open = len(keys)

    def __aiter__(self) -> "RequestJob[PartT]":
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
    """Requests of the server's clients, from their acceptance to the last part of their answers. The server works on
    `num_rows` texts at the same time, and `most_waiting` more texts may wait.
    """

    def __init__(self, num_rows: int, *, most_waiting: int = MOST_WAITING) -> None:
        self.num_rows = num_rows
        self.stopped_at: float | None = None
        """Time of the first call of `stop`, as `time.monotonic` gives it; None before."""
        self._most_waiting = most_waiting
        self._outbox: SimpleQueue[tuple[int, TextOrder] | int | None] = SimpleQueue()
        """Queue to the computing thread. An item is an order (a text to start) with its key, the key of a withdrawn
        text, or None to wake the thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keys = count()
        self._jobs: dict[int, tuple[RequestJob[PartT], int]] = {}
        """Maps the key of each unfinished text to the text's job and to the index of the text within this job. Belongs
        to the clients' thread.
        """

    def stop(self) -> None:
        """Refuse new requests from now on. The server stops when all accepted requests are answered or the grace time
        is over. May be called from any thread.
        """
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
        self._outbox.put(None)

    def open(self) -> None:
        """Register the current thread and its event loop as those of the clients' thread."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused. May be called from any thread."""
        return self.stopped_at is not None

    @property
    def num_running(self) -> int:
        """Number of texts that occupy a row of the cache. Called from the clients' thread."""
        return min(self.num_rows, len(self._jobs))

    @property
    def num_waiting(self) -> int:
        """Number of texts that wait for a row. Called from the clients' thread."""
        return len(self._jobs) - self.num_running

    def submit(self, orders: Sequence[TextOrder], *, most_unread: int = MOST_UNREAD) -> RequestJob[PartT]:
        """Submit texts, either all of them or none. Called from the clients' thread. The texts are
        cancelled if more than `most_unread` parts of their answers are unread.

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
        job: RequestJob[PartT] = RequestJob([next(self._keys) for _ in orders], most_unread)
        for which, (key, order) in enumerate(zip(job.keys, orders, strict=True)):
            self._jobs[key] = (job, which)
            self._outbox.put((key, order))
        return job

    def withdraw(self, job: RequestJob[PartT]) -> None:
        """Cancel all texts of a job that have not ended. Called from the clients' thread."""
        for key in job.keys:
            if self._jobs.pop(key, None) is not None:
                self._outbox.put(key)

    def arrivals(self, *, wait: float) -> Iterator[tuple[int, TextOrder] | int | None]:
        """Yield the orders with their keys, and the keys of withdrawn texts, since the last call. None only ends the
        wait for the first item, which lasts `wait` seconds at most. Only the computing thread calls this.
        """
        try:
            yield self._outbox.get(block=wait > 0, timeout=wait)
            while True:
                yield self._outbox.get_nowait()
        except Empty:
            return

    def close(self) -> None:
        """Refuse all unfinished jobs. The computing thread calls this after its last step, or if the clients' thread
        has ended before its loop began.
        """
        if self._loop is not None:
            self.schedule(self._turn_away)

    def schedule(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the clients' thread. May be called from any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the clients' loop is closed because their thread has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _turn_away(self) -> None:
        why = Refusal("The server stopped before the text was complete.", status=503, code="stopping")
        for job in {job for job, _ in self._jobs.values()}:
            job.pieces.put_nowait(why)
        self._jobs.clear()

    def hand_out(self, keyed: Sequence[tuple[int, PartT]]) -> None:
        """Give each part to the job of its text, by the text's key. Called from the clients' thread."""
        for key, piece in keyed:
            if key in self._jobs:
                job, which = self._jobs[key]
                if job.pieces.qsize() >= job.most_unread:
                    self.refuse(key, _unread())
                    continue
                job.pieces.put_nowait((which, piece))
                if piece.finish:
                    del self._jobs[key]

    def refuse(self, key: int, why: Refusal) -> None:
        """End the job of a text with a refusal. The refusal replaces the pieces that the client has not read. Called
        from the clients' thread.
        """
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
