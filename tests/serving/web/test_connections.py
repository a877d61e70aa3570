"""Connections of a real server, with an application that needs no model."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPMessage, HTTPResponse
from typing import Any

import pytest
import uvicorn

from crosscut.serving.web import guard
from crosscut.serving.web.connections import MOST_CONNECTIONS, Connections, allow_connections
from crosscut.serving.web.guard import Guard

SOON = 0.3
"""Seconds that a client has for the head of a request."""

GET = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(size: int, path: str = "/") -> bytes:
    """Head of a request."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


@dataclass
class Running:
    """A server; requests for /wait are answered when `open` is called."""

    port: int = 0
    waiting: list[asyncio.Event] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        total = 0
        while (message := await receive()).get("more_body"):
            total += len(message["body"])
        total += len(message.get("body", b""))  # a client that leaves sends none
        if scope["path"] == "/wait":
            self.waiting.append(asyncio.Event())
            await self.waiting[-1].wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"%8d" % total})

    def connect(self, content: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(content)
        return connection

    def wait_for(self, number: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.waiting) < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def open(self) -> None:
        assert self.loop is not None
        for event in self.waiting:
            self.loop.call_soon_threadsafe(event.set)


@contextmanager
def servers() -> Iterator[Callable[..., Running]]:
    """Function that starts a server with limits on connections."""
    with ExitStack() as ends:

        def begin(**limits: Any) -> Running:
            running = Running()
            connections = Connections(**{"head_seconds": SOON, **limits})
            app = Guard(running, key=None, names=["localhost"])
            listener = ends.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            running.port = listener.getsockname()[1]
            server = uvicorn.Server(
                uvicorn.Config(app, http=connections, lifespan="off", log_level="critical", backlog=MOST_CONNECTIONS)  # type: ignore[arg-type]
            )
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            ends.callback(thread.join, 10)
            ends.callback(setattr, server, "should_exit", True)
            while not server.started:
                time.sleep(0.01)
            return running

        yield begin


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    with servers() as start:
        yield start


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with servers() as start:
        yield start()


def answer(connection: socket.socket) -> tuple[int, bytes, HTTPMessage]:
    """Status, body and headers of the next answer on a connection."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.read(), response.headers


def error(connection: socket.socket) -> tuple[int, Any]:
    """Status and error of the next answer on a connection."""
    status, body, _ = answer(connection)
    return status, json.loads(body)["error"]


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
BEFORE = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nab"


def test_clients_that_do_not_ask_in_time_lose_their_connections(running):
    began = time.monotonic()
    contents = [b"", b"G", GET[:-2], BEFORE + b"GET", BEFORE + BEFORE + b"P"]
    connections = [running.connect(content) for content in contents]
    for content, connection in zip(contents, connections, strict=True):
        with closing(connection):
            told = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # noqa: B023 - until the server closes it
        assert told.count(b"HTTP/1.1 200 OK") == content.count(BEFORE)
        last = told[told.index(b"HTTP/1.1 408 Request Timeout") :].partition(b"\r\n\r\n")[2]
        message = json.loads(last)["error"]["message"]
        assert message == "The head of a request must arrive within 0.3 seconds, but did not. Send the request again."
    assert time.monotonic() - began < 5


def test_client_that_sends_a_head_byte_by_byte_loses_its_connection(running):
    with closing(running.connect()) as connection, pytest.raises(OSError):
        for byte in GET * 10:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)


def test_answer_may_take_longer_than_the_head_of_a_request(running):
    connection = running.connect(GET)
    running.wait_for(1)
    time.sleep(2 * SOON)
    running.open()
    assert answer(connection)[0] == 200
    connection.close()


def test_clients_that_do_not_send_their_requests_in_time_are_told(running, monkeypatch):
    """Two clients send only the head of a request, and two send a body byte by byte."""
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.6)  # all bytes must arrive before the answer
    connections = [running.connect(head) for head in (post(1000), CHUNKED) * 2]
    for byte in b"byte by byte":
        connections[2].sendall(bytes([byte]))
        connections[3].sendall(b"1\r\n%c\r\n" % byte)
        time.sleep(0.01)
    for connection in connections:
        with closing(connection):
            status, told = error(connection)
            assert status == 408
            assert told["message"] == "A request must arrive within 0.6 seconds, but did not. Send a smaller request."
            assert connection.recv(1) == b"", "it is closed"


def test_new_client_takes_the_place_of_the_one_that_has_been_silent_for_longest(start):
    running = start(most=3, head_seconds=60)
    active = running.connect(GET)
    running.wait_for(1)
    silent = [running.connect() for _ in range(2)]
    with closing(running.connect(post(2) + b"ab")) as new:
        assert answer(new)[0] == 200
        status, told = error(silent[0])
        assert (status, told["code"]) == (503, "overloaded")
        silent[1].sendall(post(1) + b"a")  # it has kept its place
        assert answer(silent[1])[0] == 200
    running.open()
    assert answer(active)[0] == 200
    for connection in (active, *silent):
        connection.close()


def test_client_is_told_where_all_others_have_requests(start):
    running = start(most=2, head_seconds=60)
    active = [running.connect(GET) for _ in range(2)]
    running.wait_for(2)
    with closing(running.connect()) as new:
        status, _, headers = answer(new)
        assert (status, headers["Retry-After"]) == (503, "1")
    running.open()
    for connection in active:
        assert answer(connection)[0] == 200
        connection.close()


@pytest.mark.parametrize(
    ("most", "num_streams", "num_others"), [(200, 120, 40), pytest.param(1300, 1000, 100, marks=pytest.mark.slow)]
)
def test_many_streams_and_others_are_served_among_silent_ones(start, most, num_streams, num_others):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    running = start(most=allow_connections(most), head_seconds=60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(before[1], 8192)), before[1]))
    try:
        with ExitStack() as silent:
            for _ in range(most + 100):
                silent.enter_context(closing(running.connect()))
            assert asyncio.run(ask_all(running, num_streams, num_others)) == num_streams + num_others
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def ask_all(running: Running, num_streams: int, num_others: int) -> int:
    """Number of clients that are answered, if many ask at once. The others ask while the streams are open."""

    async def ask(content: bytes) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(content)
        found = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        return found == b"HTTP/1.1 200 OK\r\n"

    streams = [asyncio.create_task(ask(GET)) for _ in range(num_streams)]
    while len(running.waiting) < num_streams:
        assert not any(task.done() for task in streams)
        await asyncio.sleep(0.01)
    others = await asyncio.gather(*(ask(post(3) + b"abc") for _ in range(num_others)))
    running.open()
    return sum(others) + sum(await asyncio.gather(*streams))


def test_large_requests_do_not_fill_the_memory(start, monkeypatch):
    monkeypatch.setattr(guard, "MOST_HELD", 300_000)
    monkeypatch.setattr(guard, "SMALL_BODY", 1000)
    running = start()
    with closing(running.connect(post(200_000, "/wait") + b"x" * 200_000)) as large:
        running.wait_for(1)
        for size, status in ((200_000, 503), (900, 200)):
            with closing(running.connect(post(size) + b"x" * size)) as other:
                assert answer(other)[0] == status
        running.open()
        assert answer(large)[1] == b"  200000"
    with closing(running.connect(post(200_000) + b"x" * 200_000)) as later:
        assert answer(later)[1] == b"  200000"


def chunked(size: int, count: int) -> bytes:
    return CHUNKED + b"%x\r\n%s\r\n" % (size, b"x" * size) * count + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("size", "count", "status"), [(1, 256, 200), (1, 257, 400), (63, 300, 400), (64, 3000, 200), (60_000, 9, 200)]
)
def test_a_request_in_many_small_chunks_is_refused(running, size, count, status):
    """Each chunk takes the server as long as thousands of bytes, and all clients wait for it."""
    with closing(running.connect(chunked(size, count))) as connection:
        found, body, _ = answer(connection)
        assert found == status
        assert status == 400 or int(body) == size * count
        assert status == 200 or connection.recv(1) == b"", "it is closed"


def test_chunks_are_counted_for_each_request(running):
    with closing(running.connect()) as connection:
        for _ in range(3):
            connection.sendall(chunked(1, 200))
            assert answer(connection)[:2] == (200, b"     200")


def test_files_are_allowed_for_connections():
    """In a process of its own, since a hard limit cannot be raised again."""
    program = (
        "import resource\n"
        "from crosscut.serving.web.connections import allow_connections\n"
        "for hard in (5000, 1000, 100):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "    print(allow_connections(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "4096 4352 5000\n744 1000 1000\n1 100 100\n"
