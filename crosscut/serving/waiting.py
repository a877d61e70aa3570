"""Waiting in the thread that serves clients: until other threads finish their work, or a client disconnects."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

_T = TypeVar("_T")


class Readers:
    """Threads that read requests, at most `count` at a time, so that other streams continue while a long prompt is
    encoded.

    The process does not wait for these threads when it ends, unlike for the threads of `asyncio.to_thread`.
    """

    def __init__(self, count: int) -> None:
        self._turns = asyncio.Semaphore(count)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread and return its result.

        If the caller is cancelled before the work begins, the work never begins. If the caller is cancelled later, the
        work continues, and counts as one of `count` until it ends.
        """
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        outcome: Future[_T] = Future()

        def end_turn(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed because the server has ended
                loop.call_soon_threadsafe(self._turns.release)

        outcome.add_done_callback(end_turn)
        outcome.set_running_or_notify_cancel()
        threading.Thread(target=_work, args=(work, outcome), daemon=True, name="reader").start()
        return await asyncio.wrap_future(outcome)


def _work(work: Callable[[], _T], outcome: "Future[_T]") -> None:
    try:
        result = work()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


async def until_gone(work: Awaitable[_T], receive: Receive) -> _T:
    """Result of `work`. If the client disconnects first, `work` is cancelled and `ClientDisconnect` is raised."""
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
