"""Render a chat template in a separate process (`program`), which is kept from request to request."""

import os
import select
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import IO

from crosscut.config import ConfigError
from crosscut.serving.processes import end_process, start_process
from crosscut.serving.templates import program
from crosscut.serving.templates.program import JinjaLimits, read_message, write_message

_USUAL_SECONDS = 0.1
"""Time in seconds after which a slow rendering's process gets the lowest scheduling priority. A usual rendering takes
far less time."""


class RenderingError(Exception):
    """Failure to render a template. The message is a clause, such as "it needs more than 512 MiB of memory"."""

    def __init__(self, reason: str, *, is_limit: bool) -> None:
        super().__init__(reason)
        self.is_limit = is_limit
        """True if the template exceeded a limit or crashed its process, false if the template raised an error."""


class Renderer:
    """A template with the process that renders it. If the process has ended, the next rendering starts a new process.

    If a rendering takes unusually long, its process gets the lowest scheduling priority (Linux only): the process then
    runs only while no other process wants the processor, so that one slow template does not slow down the model and
    other programs. The process keeps this priority, so it is ended after its answer.

    Raises `ConfigError` if the template is invalid, or if it exceeds the limits even for the messages in `trial`.
    `place` names the template's file in the error. Several threads may call `render`; one rendering runs at a time.
    """

    def __init__(
        self, source: str, trial: Mapping[str, object], *, place: str, limits: JinjaLimits | None = None
    ) -> None:
        self._source, self._limits = source, limits or JinjaLimits()
        self._lock = threading.Lock()
        is_compiled = False
        try:
            self._process = self._start()
            is_compiled = True
            self.render(trial)
        except RenderingError as error:
            if error.is_limit or not is_compiled:  # a valid template may still reject the trial
                what = "that renders a short chat within limits" if error.is_limit else "in Jinja"
                raise ConfigError(
                    f"`{place}` must hold a chat template {what}, but {error}. Correct the template, or remove it to "
                    "serve completions only."
                ) from None

    def render(self, names: Mapping[str, object]) -> str:
        """Render the template with `names` as its variables. Raises `RenderingError`."""
        with self._lock:
            if self._process.poll() is not None:
                self._end()
                self._process = self._start()
            try:
                return self._answer(self._process, names, patience=_USUAL_SECONDS)
            finally:
                if self._has_yielded:
                    self._end()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = start_process([program.__file__])
        self._end = weakref.finalize(self, end_process, process)
        self._has_yielded = False
        self._answer(process, {"source": self._source, "limits": asdict(self._limits)})
        return process

    def _answer(
        self, process: "subprocess.Popen[bytes]", message: Mapping[str, object], *, patience: float | None = None
    ) -> str:
        """Send a message to the process and return the text of its answer. If the answer takes longer than `patience`
        seconds, the process gets the lowest scheduling priority. Raises `RenderingError` if the answer is an error, or
        if the process has ended.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, message)
            if patience is not None and not _is_ready(process.stdout, patience):
                self._has_yielded = _yield_processor(process.pid)
            answer = read_message(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise RenderingError(self._reason_of_end(process.wait()), is_limit=True)
        if "text" in answer:
            return str(answer["text"])
        is_limit = "limit" in answer
        raise RenderingError(answer["limit" if is_limit else "error"], is_limit=is_limit)

    def _reason_of_end(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"it takes more than {self._limits.seconds:g} seconds"
        return f"it breaks the process that renders it (exit status {status})"


def _is_ready(stream: IO[bytes], seconds: float) -> bool:
    """Whether the stream has data to read, or ends, within `seconds`."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _yield_processor(process: int) -> bool:
    """Let a process run only while no other process wants the processor. Returns whether the system supports this."""
    with suppress(AttributeError, OSError):  # no Linux, or the process has just ended
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
        return True
    return False
