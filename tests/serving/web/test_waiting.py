"""Requests are read in threads that nobody has to wait for."""

import asyncio
import threading
import time

import pytest
from starlette.requests import ClientDisconnect

from crosscut.serving.web.waiting import Pace, Readers, until_gone
from tests.serving.conftest import in_loop


@in_loop
async def test_readers_return_and_raise_what_their_work_does():
    readers = Readers(1)
    assert await readers.run(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await readers.run(lambda: 1 // 0)
    assert await readers.run(lambda: threading.current_thread().daemon)


def test_an_abandoned_reader_keeps_its_turn_and_the_next_one_never_begins():
    """So that clients that disconnect do not pile up work."""
    begun: list[str] = []
    free = threading.Event()

    def work(name: str) -> None:
        begun.append(name)
        free.wait(10)

    async def disconnect() -> dict[str, str]:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def talk() -> None:
        readers = Readers(1)
        for name in ("first", "second", "third"):
            with pytest.raises(ClientDisconnect):
                await until_gone(readers.run(lambda name=name: work(name)), disconnect)
        free.set()
        await readers.run(lambda: work("last"))
        assert begun == ["first", "last"]

    asyncio.run(talk())


def test_requests_are_read_at_a_pace_and_in_their_order_while_texts_run():
    order: list[int] = []

    async def talk() -> float:
        pace = Pace(lambda: True, seconds=0.02, bytes_per_second=1e6)

        async def ask(number: int) -> None:
            await pace.start()
            order.append(number)

        began = time.monotonic()
        await asyncio.gather(*(ask(number) for number in range(5)))
        return time.monotonic() - began

    assert asyncio.run(talk()) >= 0.08
    assert order == [0, 1, 2, 3, 4]


def test_an_idle_server_reads_requests_at_once_and_large_ones_cost_their_bytes():
    async def talk(num_bytes: int, *, busy: bool) -> float:
        pace = Pace(lambda: busy, seconds=0.0, bytes_per_second=1e6)
        await pace.start()
        pace.charge(num_bytes)
        began = time.monotonic()
        await pace.start()
        return time.monotonic() - began

    assert asyncio.run(talk(100_000_000, busy=False)) < 10
    assert asyncio.run(talk(100_000, busy=True)) >= 0.09


def test_a_client_that_leaves_loses_its_turn():
    async def talk() -> float:
        pace = Pace(lambda: True, seconds=0.2, bytes_per_second=1e6)
        await pace.start()
        left = [asyncio.create_task(pace.start()) for _ in range(50)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        began = time.monotonic()
        await pace.start()
        return time.monotonic() - began

    assert asyncio.run(talk()) < 5


@in_loop
async def test_the_threads_of_readers_are_kept():
    readers = Readers(1)
    first = await readers.run(threading.get_ident)
    assert await readers.run(threading.get_ident) == first
