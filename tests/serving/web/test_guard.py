"""The guard in front of the routes."""

import asyncio
from typing import Any

import pytest

from crosscut.serving.web import guard
from crosscut.serving.web.guard import Guard

SCOPE = {"type": "http", "path": "/v1/models", "headers": [(b"host", b"localhost")]}


async def answered(app: Any, send: Any) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    await Guard(app, key=None, names=["LocalHost"])(SCOPE, receive, send)


def test_a_client_that_reads_nothing_for_too_long_loses_its_request(monkeypatch):
    monkeypatch.setattr(guard, "UNREAD", 0.05)
    ended = []

    async def stuck(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async def app(_: Any, __: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        finally:
            ended.append("request")

    asyncio.run(asyncio.wait_for(answered(app, stuck), 10))
    assert ended == ["request"]


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("localhost:", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("127.0.0.1:80@evil.com", False),
        ("[::1].evil.com", False),
        ("[::1]evil.com:80", False),
        ("[::1]:80:80", False),
        ("localhost:80:80", False),
        ("localhost:evil.com", False),
        ("localhost:80/evil.com", False),
        ("localhost@evil.com", False),
        ("localhost.evil.com", False),
        ("localhost:80\n", False),
        ("localhost:\u0661", False),
        ("::1", False),
        ("", False),
    ],
)
def test_only_a_name_of_the_server_with_a_port_is_served_without_a_key(host, is_served):
    reached, sent = [], []

    async def app(*_: Any) -> None:
        reached.append(True)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "path": "/", "headers": [(b"host", host.encode("latin-1", "replace"))]}
        await Guard(app, key=None, names=["localhost", "[::1]", "127.0.0.1"])(scope, send, send)

    asyncio.run(ask())
    assert bool(reached) is is_served
    assert is_served or sent[0]["status"] == 421


@pytest.mark.parametrize("error", [ValueError("NaN"), RecursionError(), MemoryError("large"), KeyError("x")], ids=repr)
def test_a_bug_in_one_request_is_answered_with_a_number_that_the_log_has(error, capsys):
    async def app(*_: Any) -> None:
        raise error

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(answered(app, send))
    assert sent[0]["status"] == 500
    number = sent[1]["body"].split(b"under the number ")[1][:8].decode()
    errors = capsys.readouterr().err
    assert f"Failure {number}: Traceback" in errors
    assert repr(type(error).__name__)[1:-1] in errors
