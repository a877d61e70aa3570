"""Functions and classes with which the clients' thread waits until another thread finishes its work or a client
disconnects.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

_T = TypeVar("_T")

_Job = Callable[[], None]


class Readers:
    """Threads that read at most `count` requests at a time. The streams of other requests continue while a long prompt
    is encoded.

    Unlike the threads of `asyncio.to_thread`, these threads do not delay the end of the process. Idle threads are kept,
    because the start of a new thread would delay the caller by some milliseconds while the model computes.
    """

    def __init__(self, count: int) -> None:
        self._turns = asyncio.Semaphore(count)
        self._works: SimpleQueue[_Job | None] = SimpleQueue()
        weakref.finalize(self, _end, self._works, count)
        for _ in range(count):
            threading.Thread(target=_work, args=(self._works,), daemon=True, name="reader").start()

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread and return its result.

        If the caller is cancelled before the work begins, the work never begins. If the caller is cancelled later, the
        work continues, and its thread counts towards the limit of `count` threads until the work ends.
        """
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        outcome: Future[_T] = Future()

        def end_turn(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed because the server has ended
                loop.call_soon_threadsafe(self._turns.release)

        outcome.add_done_callback(end_turn)
        outcome.set_running_or_notify_cancel()
        self._works.put(partial(_into, outcome, work))
        return await asyncio.wrap_future(outcome)


def _work(works: "SimpleQueue[_Job | None]") -> None:
    while (job := works.get()) is not None:
        job()
        del job  # while the thread waits for the next request, it keeps nothing of this one


def _into(outcome: "Future[_T]", work: Callable[[], _T]) -> None:
    """Set the result of `work`, or its error."""
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        del outcome, work  # the traceback of the error keeps them otherwise


def _end(works: "SimpleQueue[_Job | None]", count: int) -> None:
    for _ in range(count):
        works.put(None)


class Pace:
    """Minimum interval between two requests that are read while texts are generated. Requests are read in the order of
    their arrival.

    Reading a request and computing a token share one interpreter. Without a pace, clients that send many requests would
    take most of the interpreter's time, and a client that sends one request would wait behind them.
    """

    def __init__(self, is_busy: Callable[[], bool], *, seconds: float, bytes_per_second: float) -> None:
        self._is_busy, self._seconds, self._bytes_per_second = is_busy, seconds, bytes_per_second
        self._turn = asyncio.Lock()
        self._next = 0.0

    async def start(self) -> None:
        """Wait until the next request may be read."""
        async with self._turn:
            while (wait := self._next - time.monotonic()) > 0 and self._is_busy():
                await asyncio.sleep(wait)
            self._next = time.monotonic() + self._seconds

    def charge(self, num_bytes: int) -> None:
        """Delay the next request by the time that it takes to read `num_bytes` bytes."""
        self._next += num_bytes / self._bytes_per_second


async def until_gone(work: Awaitable[_T], receive: Receive) -> _T:
    """Wait for `work` and return its result. If the client disconnects first, `work` is cancelled and
    `ClientDisconnect` is raised.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
