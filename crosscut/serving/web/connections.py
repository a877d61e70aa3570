"""Connections of a server, with limits on their number and on the time that a client takes to send a request.

uvicorn starts to handle a request when the request's head is complete, and waits for this head for as long as the
client is connected. The classes here close a connection whose client does not send a request in time. If there are too
many connections, the connection that has waited longest for a request is closed. Clients that only hold connections
open therefore cannot keep other clients out. `Guard` limits the time for the body of a request.
"""

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from crosscut.serving.protocol.refusals import Refusal

MOST_CONNECTIONS = 4096
"""Maximum number of open connections."""

_OTHER_FILES = 256
"""Number of files that a server may have open besides its connections."""

HEAD_SECONDS = 30.0
"""Time in seconds that a client has to send the head of a request, from the start of the connection or from the end of
the previous answer."""


_FEW_CHUNKS, _LEAST_CHUNK = 256, 64
"""Number of chunks of a request after which their mean size must be at least `_LEAST_CHUNK` bytes. Each chunk takes the
server as much time as thousands of bytes."""


class Connections:
    """Open connections of one server, at most `most`. uvicorn calls the object for each new connection."""

    def __init__(self, most: int = MOST_CONNECTIONS, *, head_seconds: float = HEAD_SECONDS) -> None:
        self._most, self._head_seconds = most, head_seconds
        self._silent: dict[_Connection, asyncio.TimerHandle] = {}
        """Connections whose clients have not sent the head of a request, with the timer of each connection. The
        connection that has waited longest comes first."""

    def __call__(self, **given: Any) -> "_Connection":
        """Make the protocol object for a new connection, from uvicorn's arguments."""
        return _Connection(self, **given)

    def admit(self, new: "_Connection", num_open: int) -> None:
        """Accept a new connection, and start the time limit for its first request. `num_open` is the number of open
        connections. If there are too many, refuse the connection that has waited longest without a request, or refuse
        the new connection if no connection waits.
        """
        if num_open > self._most:
            if not self._silent:
                new.refuse(_full(self._most))
                return
            next(iter(self._silent)).refuse(_full(self._most))
        self.wait_for_request(new)

    def wait_for_request(self, connection: "_Connection") -> None:
        """Start the timer within which the client of a connection must send the head of the next request."""
        if connection not in self._silent:
            loop = asyncio.get_running_loop()
            self._silent[connection] = loop.call_later(self._head_seconds, connection.refuse, _late(self._head_seconds))

    def stop_waiting(self, connection: "_Connection") -> None:
        """Stop the timer of a connection, because the client has sent a request or the connection has ended."""
        if timer := self._silent.pop(connection, None):
            timer.cancel()


class _Connection(H11Protocol):
    """uvicorn's protocol object for one connection. It tells the server's `Connections` when the client has sent a
    request.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.conn = _RequestParser(h11.SERVER, self.conn._max_incomplete_event_size)
        self._all = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.admit(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.stop_waiting(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # a request that the client has sent ahead begins here
        self._look()

    def refuse(self, refusal: Refusal) -> None:
        """Send the refusal to the client and close the connection, which has no request in progress."""
        self._all.stop_waiting(self)
        self.connections.discard(self)
        if not self.transport.is_closing():
            self.transport.write(_response(refusal))
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP. If the answer has already begun, only close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _look(self) -> None:
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request or self.transport.is_closing():
            self._all.stop_waiting(self)
        else:
            self._all.wait_for_request(self)


class _RequestParser(h11.Connection):
    """Parser of HTTP that ends a connection whose client sends a request in too many small chunks."""

    _num_chunks = _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event. Raises `RemoteProtocolError` for an invalid request."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            is_few = self._num_chunks < _FEW_CHUNKS
            if event.chunk_start and not is_few and self._num_bytes < self._num_chunks * _LEAST_CHUNK:
                raise h11.RemoteProtocolError("the chunks are too small")
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
        return event


def allow_connections(most: int = MOST_CONNECTIONS) -> int:
    """Raise this process's limit on open files until `most` connections are possible, as far as the system's hard limit
    allows. Returns the number of connections that are now possible, at most `most`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - _OTHER_FILES))


def _response(refusal: Refusal) -> bytes:
    """Complete HTTP response that closes the connection."""
    content = json.dumps(refusal.body).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
        **refusal.headers,
    }
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}", *map(": ".join, headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _full(most: int) -> Refusal:
    return Refusal(
        f"The server has at most {most:,} connections, and all of them are in use. Try again later.",
        status=503,
        code="overloaded",
        retry=True,
    )


def _late(seconds: float) -> Refusal:
    return Refusal(
        f"The head of a request must arrive within {seconds:g} seconds, but did not. Send the request again.",
        status=408,
    )
