"""Process that reads requests (`program`), which is kept from request to request."""

import signal
import subprocess
import weakref
from collections.abc import Callable, Sequence

from crosscut.config import ConfigError
from crosscut.serving.processes import end_process, importing_crosscut, start_process
from crosscut.serving.protocol.embeddings import EmbeddingRequest
from crosscut.serving.protocol.fields import RequestKind
from crosscut.serving.protocol.model import ServedModel
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.protocol.requests import Request
from crosscut.serving.reading import program
from crosscut.serving.reading.messages import num_id_bytes, pack_served, unpack_request
from crosscut.serving.reading.program import seconds_for
from crosscut.serving.templates.program import read_message, write_message

_VARIABLES = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables with which a process computes on one core."""


class ReadingProcess:
    """Process that reads requests for the model `served`. If the process has ended, the next request starts a new one.

    The process is ready for the `kinds` of requests before it reads the first one. `niceness` is
    added to the process's niceness: with a high niceness, the process gives way to other processes. `patience` is a
    factor for the time that a request may take. One thread at a time may call `read`.
    """

    def __init__(
        self, served: ServedModel, kinds: Sequence[RequestKind], *, niceness: int = 0, patience: float = 1.0
    ) -> None:
        self._patience = patience
        self._first = {**pack_served(served), "kinds": kinds, "niceness": niceness, "patience": patience}
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process if it is not running, and return it. Does not wait until the process is ready."""
        if self._process is None or self._process.poll() is not None:
            self._end()  # closes the pipes of a process that has ended
            self._process = start_process(["-m", program.__name__], {**importing_crosscut(), **_VARIABLES})
            self._end = weakref.finalize(self, end_process, self._process)
            assert self._process.stdin is not None
            write_message(self._process.stdin, self._first)
        return self._process

    def read(self, kind: RequestKind, body: bytes) -> Request | EmbeddingRequest:
        """Read a request. Raises `Refusal`, or another error if the process fails."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, {"kind": kind, "size": len(body)})
            process.stdin.write(body)
            process.stdin.flush()
            answer = read_message(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise _ended(process.wait(), self._patience * seconds_for(len(body)))
        if "refusal" in answer:
            raise Refusal(**answer["refusal"])
        if "request" not in answer:
            raise ConfigError(answer["error"]) if "error" in answer else RuntimeError(answer["failure"])
        table = answer["request"]
        content = process.stdout.read(size := num_id_bytes(table))
        if len(content) < size:
            raise _ended(process.wait(), self._patience * seconds_for(len(body)))
        return unpack_request(table, content)


def _ended(status: int, seconds: float) -> Exception:
    """Return the error of a request during which the process ended with a status. `seconds` is the request's limit."""
    if status == -signal.SIGPROF:
        return Refusal(
            f"The request must be read within {seconds:.2g} seconds of processor time, but was not. Send a "
            "smaller request."
        )
    return RuntimeError(f"The process that reads requests ended with the status {status}.")
