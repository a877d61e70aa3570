"""Hostile requests to a running server, and an honest request after each batch.

One `crosscut serve` takes all batches, so that memory that the server never frees adds up. A request is a head and a
body, each damaged by edits, and a way to send it: some clients leave early, never read, or send slowly.
"""

import json
import os
import pty
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.commands import environment_here
from benchmarks.fuzzing.cases import Case, draw
from benchmarks.fuzzing.edits import damage
from benchmarks.fuzzing.findings import Finding, error_in, keep, raw_in
from benchmarks.fuzzing.kinds import EMBEDDINGS, REQUESTS_KIND
from benchmarks.fuzzing.sandbox import HARD_BYTES, LONGEST, MEMORY_BYTES, frames_in, place_in
from benchmarks.fuzzing.valid import MODEL, REQUESTS
from benchmarks.fuzzing.valid_tunings import EMBEDDING_REQUESTS, ENCODER
from benchmarks.fuzzing.worker import Figures, Setting, prepare_process, strategy_of
from benchmarks.processes import memory_of, port_of, reset_peak
from benchmarks.serving.attack import request

WAYS = (*["whole"] * 4, "leave after head", "leave in body", "leave in answer", "never read", "slow")
"""Ways to send a request. A case's number chooses one."""

_CLIENTS = 8
_STATUSES = {200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 421, 422, 429, 431, 501, 503, 505}
_MOST_ANSWER = 32 << 20
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(frozen=True)
class Service:
    """A model to serve, and its requests."""

    model: str
    """Folder of the model."""
    requests: Mapping[str, tuple[str, Mapping[str, Any]]]
    """Path and body of the valid requests, by name."""
    folder: str
    """Folder of the valid requests."""
    honest: tuple[str, Mapping[str, Any]]
    """Path and body of the honest request."""
    key: str
    """Key of the honest answer whose value must stay the same."""


SERVICES = {
    REQUESTS_KIND.name: Service(
        MODEL, REQUESTS, "requests",
        ("/v1/completions", {"model": MODEL, "prompt": "The state of", "max_tokens": 6, "temperature": 0,
                             "logprobs": 1}), "choices",
    ),
    EMBEDDINGS.name: Service(
        ENCODER, EMBEDDING_REQUESTS, "embeddings",
        ("/v1/embeddings", {"model": ENCODER, "input": ["the state", "my fellow citizens"]}), "data",
    ),
}  # fmt: skip
"""Services by the name of their kind."""


class Answer(NamedTuple):
    """End of one request."""

    failures: list[tuple[str, str, str]]
    seconds: float


class Server:
    """A running `crosscut serve` whose output goes to a terminal."""

    def __init__(self, valid: Path, service: Service) -> None:
        self._service = service
        self._output, terminal = pty.openpty()
        tty.setraw(terminal)
        command = [sys.executable, "-X", "faulthandler", "-m", "crosscut", "serve", service.model]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--device", "cpu"], cwd=valid, stdin=subprocess.DEVNULL, stdout=terminal,
            stderr=terminal, start_new_session=True, env=environment_here(TERM="dumb"),
        )  # fmt: skip
        os.close(terminal)
        self._said, self._lock = b"", threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        self.port = port_of(self.process, lambda: self._said.decode(errors="replace"))
        self.take_said()
        self.honest = self.ask_honestly()
        self.idle = memory_of(self.process.pid, "VmRSS")
        limit = memory_of(self.process.pid, "VmSize") + HARD_BYTES
        resource.prlimit(self.process.pid, resource.RLIMIT_AS, (limit, limit))

    def _listen(self) -> None:
        with suppress(OSError):  # the other end is closed
            while piece := os.read(self._output, 1 << 16):
                with self._lock:
                    self._said += piece

    def take_said(self) -> bytes:
        """Output since the last call."""
        with self._lock:
            said, self._said = self._said, b""
        return said

    def ask_honestly(self) -> Any:
        """Answer of the server to the honest request. Raises `OSError`, `ValueError` or `KeyError`."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=LONGEST) as client:
            client.sendall(request(*self._service.honest))
            answer = b""
            while piece := client.recv(1 << 16):
                answer += piece
        return json.loads(answer.partition(b"\r\n\r\n")[2])[self._service.key]

    def stacks(self) -> str:
        """End the server and return the stacks of its threads."""
        self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        time.sleep(0.2)
        return self.take_said().decode(errors="replace")

    def stop(self) -> None:
        """End the server at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with suppress(OSError):
            os.close(self._output)


def run_requests(kind: str, batch: int, most: int, setting: Setting, server: list[Server]) -> Figures:
    """Send the first `most` requests of a batch. `server` holds the running server, if there is one."""
    prepare_process()
    figures = Figures()
    cases = draw(strategy_of(kind, setting.valid), setting.seed, kind, batch)[:most]
    running = _running(server, setting, SERVICES[kind])
    with suppress(OSError):
        reset_peak(running.process.pid)
    with ThreadPoolExecutor(_CLIENTS) as pool:
        answers = list(pool.map(lambda case: _send(running, case, setting), cases))
    findings = []
    for case, answer in zip(cases, answers, strict=True):
        figures.note(f"{setting.seed}/{kind}/{case.number}", answer.seconds, 0)
        findings += [_finding(case, failure, setting) for failure in answer.failures]
    peak = max(0, memory_of(running.process.pid, "VmHWM") - running.idle)
    if peak > figures.peak:
        figures.peak, figures.peak_case = peak, f"batch {batch}"
    findings += [_finding(cases[-1], failure, setting) for failure in _server_failures(running, server, peak)]
    said = running.take_said()
    text = said.decode(errors="replace")
    if error := error_in(text):
        culprit = next((one.case for one in findings if one.failure == "status"), cases[-1])
        failure = ("traceback", place_in(frames_in(text)), f"in batch {batch}: {error}")
        findings.append(_finding(culprit, failure, setting, trace=text[-20_000:]))
    if raw := raw_in(said, "colours"):  # the log has colours on any terminal
        findings.append(_finding(cases[-1], ("raw", "", f"in batch {batch}: {raw}"), setting))
    for finding in findings:
        if figures.add(finding) and setting.keep is not None and finding.key not in setting.known:
            place = keep(setting.keep, finding, None)
            (place / "request.bin").write_bytes(b"".join(_message(finding.case, setting)))
    return figures


def _running(server: list[Server], setting: Setting, service: Service) -> Server:
    if not server:
        server.append(Server(setting.valid, service))
    return server[0]


def _server_failures(running: Server, server: list[Server], peak: int) -> list[tuple[str, str, str]]:
    """Failures of the server after a batch. A server that fails is ended; the next batch starts another."""
    if (code := running.process.poll()) is not None:
        server.clear()
        return [("crash", f"exit {code}", f"the server exited with {code}")]
    failures = []
    if peak > MEMORY_BYTES:
        failures.append(("memory", "", f"peak {peak >> 20:,} MiB above the idle server"))
    try:
        said = running.ask_honestly()
    except (OSError, ValueError, KeyError) as error:
        stacks = running.stacks()
        failures.append(("unfair", place_in(frames_in(stacks)[::-1]), f"the honest request failed: {error!r}"))
    else:
        if said == running.honest and not failures:
            return []
        if said != running.honest:
            failures.append(("unfair", "", f"the honest request got {str(said)[:200]}"))
    running.stop()
    server.clear()
    return failures


def _finding(case: Case, failure: tuple[str, str, str], setting: Setting, trace: str = "") -> Finding:
    name, place, detail = failure
    way, (path, _) = WAYS[case.number % len(WAYS)], SERVICES[case.kind].requests[case.base]
    return Finding(kind=case.kind, failure=name, place=place or f"{path}, {way}", detail=detail, case=case,
                   seed=setting.seed, reproduction=f"request {case.base}, {way}", trace=trace)  # fmt: skip


def _message(case: Case, setting: Setting) -> tuple[bytes, bytes]:
    """Head and body of a request."""
    parts = {}
    for name in ("body.json", "head.txt"):
        content = (setting.valid / SERVICES[case.kind].folder / case.base / name).read_bytes()
        if edits := [edit for edit in case.edits if edit.file == name]:
            content = damage(name, content, edits)
        parts[name] = content
    body = parts["body.json"]
    return parts["head.txt"].replace(b"LENGTH", str(len(body)).encode()), body


def _send(server: Server, case: Case, setting: Setting) -> Answer:
    """Send a request in its way, and check the answer."""
    head, body = _message(case, setting)
    way = WAYS[case.number % len(WAYS)]
    is_whole = not any(edit.file == "head.txt" for edit in case.edits) and way in ("whole", "slow")
    began, answer, is_over = time.monotonic(), b"", False
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=LONGEST) as client:
            _write(client, head, body, way)
            if way in ("leave after head", "leave in body"):
                return Answer([], time.monotonic() - began)
            if way == "never read":
                time.sleep(0.2)
                return Answer([], time.monotonic() - began)
            until = began + (LONGEST if is_whole else 0.5)
            while len(answer) < _MOST_ANSWER and (left := until - time.monotonic()) > 0:
                ready, _, _ = select.select([client], [], [], left)
                if not ready:
                    break
                piece = client.recv(1 << 16)
                if not piece:
                    is_over = True
                    break
                answer += piece
                if way == "leave in answer":
                    return Answer([], time.monotonic() - began)
    except OSError as error:
        if server.process.poll() is None and is_whole and not isinstance(error, ConnectionError):
            return Answer([("hang", "", f"no answer: {error!r}")], time.monotonic() - began)
        return Answer(_checked(answer, whole=False), time.monotonic() - began)
    seconds = time.monotonic() - began
    if is_whole and not is_over and len(answer) < _MOST_ANSWER:
        return Answer([("hang", "", f"no end of the answer after {seconds:.1f} s")], seconds)
    return Answer(_checked(answer, whole=is_over), seconds)


def _write(client: socket.socket, head: bytes, body: bytes, way: str) -> None:
    if way == "leave after head":
        client.sendall(head)
    elif way == "leave in body":
        client.sendall(head + body[: len(body) // 2])
    elif way == "slow":
        message = head + body
        step = max(1, len(message) // 4)
        for start in range(0, len(message), step):
            client.sendall(message[start : start + step])
            time.sleep(0.02)
    else:
        client.sendall(head + body)


def _checked(answer: bytes, *, whole: bool) -> list[tuple[str, str, str]]:
    """Failures in an answer: a wrong status, and a body that is not JSON."""
    found = _STATUS.match(answer)
    if not found:
        return []
    status = int(found[1])
    if status not in _STATUSES:
        return [("status", "", f"HTTP {status}: {answer.partition(bytes.fromhex('0d0a0d0a'))[2][:200]!r}")]
    head, _, body = answer.partition(b"\r\n\r\n")
    if not whole or (b"chunked" in head.lower() and b"event-stream" not in head.lower()):
        return []
    if b"application/json" in head.lower() and (length := re.search(rb"content-length: (\d+)", head.lower())):
        return _strict([body[: int(length[1])]])  # a damaged head may be two requests with two answers
    if b"event-stream" in head.lower():
        events = re.findall(rb"data: (\{.*?\})\r?\n", body)
        return _strict(events)
    return []


def _strict(texts: list[bytes]) -> list[tuple[str, str, str]]:
    for text in texts:
        try:
            json.loads(text.decode(), parse_constant=_refuse)
        except ValueError as error:
            return [("status", "", f"answer that is not JSON ({error}): {text[:100]!r}")]
    return []


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
