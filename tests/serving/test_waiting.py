"""Requests are read in threads that nobody has to wait for."""

import asyncio
import threading

import pytest
from starlette.requests import ClientDisconnect

from crosscut.serving.waiting import Readers, until_gone


def test_readers_return_and_raise_what_their_work_does():
    async def talk() -> None:
        readers = Readers(1)
        assert await readers.run(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await readers.run(lambda: 1 // 0)
        assert await readers.run(lambda: threading.current_thread().daemon)

    asyncio.run(talk())


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
