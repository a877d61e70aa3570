"""Server of the page on this machine. It answers two addresses: `/` with the page, and `/poll` with what is new.

The server listens on 127.0.0.1 only. A foreign web page in a local browser can send requests to this machine under a
host name of its own, so the `Host` header must be a name of this machine. The server changes nothing, so it accepts
only GET. It reads the files of the runs when a page asks, and never writes.
"""

from __future__ import annotations

import errno
import json
import re
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import gethostname
from urllib.parse import parse_qsl, urlsplit

from crosscut.config import ConfigError
from crosscut.config.system.terminal import echo
from crosscut.watch.found import Runs
from crosscut.watch.pages import live_page

PORT = 7007
"""Usual port."""

_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HOST_PORT = re.compile(r":[0-9]*\Z")
_MOST_CONNECTIONS = 64


class WatchServer(ThreadingHTTPServer):
    """Server of the runs `runs` on a port of this machine. Port 0 chooses a free port. Raises `ConfigError` if the port
    is in use.
    """

    daemon_threads = True

    def __init__(self, runs: Runs, port: int) -> None:
        self.runs = runs
        self.page = live_page().encode()
        self.reading = threading.Lock()
        """Held while the runs are read, because a reader belongs to one thread at a time."""
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is in use" if error.errno == errno.EADDRINUSE else "needs the rights of root"
            raise ConfigError(
                f"`--port` must be free, but {port} {why}. Choose another port, or `--port 0` for a free one."
            ) from None

    def process_request(self, request: object, client_address: object) -> None:
        """Answer a connection in a thread of its own, unless there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Answer a connection, and give its place back."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that has left, and print any other error, which has been answered with status 500."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def poll(self, query: str) -> dict[str, object]:
        """Answer a page: the list of runs, and what is new in the runs that the page asks for."""
        asked = parse_qsl(query, keep_blank_values=True)
        cursors = {id_: at for (key, id_), (_, at) in zip(asked[::2], asked[1::2], strict=False) if key == "run"}
        with self.reading:
            runs = self.runs.refresh()
            for run in runs:
                run.source.refresh()
            told = {run.id: run.tell(cursors[run.id]) for run in runs if run.id in cursors}
            return {**self.runs.listed(), "told": told}


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = 30.0
    server_version, sys_version = "crosscut", ""

    def parse_request(self) -> bool:
        """Read the head of a request. Requests to other names and with other methods are refused."""
        if not super().parse_request():
            return False
        host = _HOST_PORT.sub("", self.headers.get("Host", "")).lower()
        if host not in _NAMES:
            self._send(421, b"`Host` must be a name of this machine, but is not.\n", "text/plain")
        elif self.command != "GET":
            self.close_connection = True
            self._send(405, b"The method must be GET, but is not.\n", "text/plain", Allow="GET")
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Answer with the page or with what is new."""
        address = urlsplit(self.path)
        if address.path == "/":
            self._send(200, self.server.page, "text/html; charset=utf-8")
        elif address.path == "/poll":
            try:
                content = json.dumps(self.server.poll(address.query), separators=(",", ":"), allow_nan=False)
            except Exception:
                self._send(500, b"The runs cannot be shown.\n", "text/plain")
                raise
            self._send(200, content.encode(), "application/json")
        else:
            self._send(404, b"This server has only `/` and `/poll`.\n", "text/plain")

    def _send(self, status: int, content: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        named = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            **headers,
        }
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (a name of the standard library)
        """Print nothing."""


def watch(places: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C."""
    runs = Runs(places)
    runs.require_any()
    with WatchServer(runs, port) as server:
        echo("\n".join([*addresses(server.server_port), "       Ctrl-C ends the page"]))
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            echo()


def addresses(port: int) -> list[str]:
    """Lines for the user: the page's address, and the command that brings it to another machine."""
    return [
        f"watch  http://127.0.0.1:{port}/",
        f"       for a browser on another machine, type there: ssh -L {port}:127.0.0.1:{port} {gethostname()}",
    ]
