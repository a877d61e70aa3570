"""Processes in which cases run: forks with a terminal of their own, a limit on time and a limit on memory.

A fork runs the real `crosscut` command for one or several cases, one after another. Its parent watches: a case
that takes too long is killed with all processes that it started, and its stack is kept. Two limits hold for memory: the
address space ends `HARD_BYTES` above the idle process, so that a case cannot harm the machine, and the peak of the
resident memory is measured for each case.
"""

import ctypes
import faulthandler
import json
import os
import pty
import re
import resource
import select
import signal
import sys
import time
import traceback
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import crosscut
from benchmarks.processes import memory_of, reset_peak

LONGEST = 10.0
"""Seconds that a case may take."""
MEMORY_BYTES = 1 << 30
"""Bytes of resident memory that a case may take above the idle process."""
HARD_BYTES = 4 << 30
"""Bytes that the address space of a case may grow by."""
MOST_OUTPUT = 4 << 20
"""Bytes of output that are kept of one case."""

_PR_SET_PDEATHSIG = 1
_END = b"\0crosscut-fuzz-end\0"
_PACKAGE = str(Path(crosscut.__file__).parent) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (.+)')


@dataclass(frozen=True)
class Job:
    """One command line in one folder."""

    folder: Path
    arguments: tuple[str, ...]
    terminal: str = "dumb"
    """Value of TERM."""
    processor: float = 0.0
    """Seconds of processor time after which the kernel ends the process, even inside a library. 0 means no limit."""


@dataclass
class Outcome:
    """Result of one case."""

    status: int | None = None
    """Exit status. None after an exception that the command did not turn into a message, a hang or a crash."""
    error: str = ""
    """The exception's type and the start of its message."""
    place: str = ""
    """Innermost place in the package, `file.py:line function`, of an exception or a hang."""
    trace: str = ""
    seconds: float = 0.0
    processor: float = 0.0
    """Seconds of processor time, with the processes that the case started."""
    peak: int = 0
    """Bytes of resident memory above the idle process."""
    hung: bool = False
    ended_by: str = ""
    """Name of the signal that ended the process."""
    output: bytes = b""
    modules: list[str] = field(default_factory=list)
    """Modules that the case imported."""


def run(jobs: Sequence[Job], *, longest: float = LONGEST) -> Iterator[Outcome]:
    """Run jobs one after another in one fork. After a hang or a crash, the jobs that are left get another fork."""
    done = 0
    while done < len(jobs):
        with _Fork(jobs[done:], longest) as fork:
            while done < len(jobs):
                outcome = fork.next()
                done += 1
                yield outcome
                if outcome.hung or outcome.ended_by:
                    break


def end_with(parent: int) -> None:
    """Let the kernel kill this process, a child of `parent`, when its parent ends, even if the parent is killed.

    A fork has only one thread, and may be inside a library for ever, so `leave_with_parent` would not end it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the call
        os._exit(1)


def place_in(frames: Sequence[tuple[str, int, str]]) -> str:
    """Innermost frame in the package, or the innermost frame if none is in the package. The last of `frames` is the
    innermost.
    """
    inside = [frame for frame in frames if frame[0].startswith(_PACKAGE)]
    if not frames:
        return ""
    file, line, name = (inside or list(frames))[-1]
    return f"{file.removeprefix(_PACKAGE)}:{line} {name}"


def frames_in(text: str) -> list[tuple[str, int, str]]:
    """Frames of a traceback that was printed."""
    return [(file, int(line), name.strip()) for file, line, name in _FRAME.findall(text)]


class _Fork:
    def __init__(self, jobs: Sequence[Job], longest: float) -> None:
        self._longest = longest
        self._output, terminal = pty.openpty()
        tty.setraw(terminal)  # no line ends are changed, and nothing is echoed
        read, results = os.pipe()
        self._results = os.fdopen(read, "rb")
        self._stacks = os.memfd_create("stacks")
        self._left = b""
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            end_with(parent)
            os.close(self._output)
            self._results.close()
            try:
                _work(jobs, longest, terminal, results, self._stacks)
            finally:
                os._exit(0)
        os.close(terminal)
        os.close(results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._results.close()
        os.close(self._output)
        os.close(self._stacks)

    def next(self) -> Outcome:
        """Wait for the next job's end."""
        began, output = time.monotonic(), self._left
        over = _END in output
        while not over:
            left = began + self._longest - time.monotonic()
            ready, _, _ = select.select([self._output], [], [], max(0.0, left))
            if not ready:
                return self._hung(output, time.monotonic() - began)
            try:
                piece = os.read(self._output, 1 << 16)
            except OSError:  # the other end is closed
                piece = b""
            if not piece:
                return self._crashed(output, time.monotonic() - began)
            output += piece
            over = _END in output[-len(piece) - len(_END) :]
            if not over and len(output) > 2 * MOST_OUTPUT:
                output = output[:MOST_OUTPUT] + output[-len(_END) :]
        output, _, self._left = output.partition(_END)
        return Outcome(**json.loads(self._results.readline()), output=output[:MOST_OUTPUT])

    def _hung(self, output: bytes, seconds: float) -> Outcome:
        trace = os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")
        threads = trace.split("\n\n")
        main = next((thread for thread in reversed(threads) if "Thread" in thread), "")
        self._kill()
        frames = frames_in(main)[::-1]
        return Outcome(place=place_in(frames), trace=trace, seconds=seconds, hung=True, output=output[:MOST_OUTPUT])

    def _crashed(self, output: bytes, seconds: float) -> Outcome:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
        return Outcome(seconds=seconds, ended_by=name, output=output[:MOST_OUTPUT])

    def _kill(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _work(jobs: Sequence[Job], longest: float, terminal: int, results: int, stacks: int) -> None:
    """Run the jobs in the fork."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (terminal, 1), (terminal, 2)):
        os.dup2(ours, theirs)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="strict", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    # New processes of `multiprocessing` do not import the benchmark again.
    vars(sys.modules["__main__"]).pop("__file__", None)
    limit_memory()
    idle, before = memory_of("self", "VmRSS"), set(sys.modules)
    for job in jobs:
        os.environ["TERM"] = job.terminal
        os.chdir(job.folder)
        os.ftruncate(stacks, 0)
        os.lseek(stacks, 0, os.SEEK_SET)
        reset_peak("self")
        # Only just before the end: a dump from another thread can crash a busy interpreter (CPython 3.11).
        faulthandler.dump_traceback_later(max(longest, LONGEST) - 1, file=stacks)
        began, used = time.monotonic(), sum(os.times()[:4])
        signal.setitimer(signal.ITIMER_PROF, job.processor)
        fields = attempt(lambda job=job: _command(job.arguments))  # type: ignore[misc]
        signal.setitimer(signal.ITIMER_PROF, 0)
        fields["seconds"], fields["processor"] = time.monotonic() - began, sum(os.times()[:4]) - used
        faulthandler.cancel_dump_traceback_later()
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        fields["peak"] = max(0, max(memory_of("self", "VmHWM"), children) - idle)
        fields["modules"] = sorted(set(sys.modules) - before)
        before = set(sys.modules)
        with suppress(Exception):
            sys.stdout.flush()
        _write_all(1, _END)
        _write_all(results, json.dumps(fields).encode() + b"\n")


def limit_memory() -> None:
    """Limit the address space of this process and of the processes that it starts."""
    limit = memory_of("self", "VmSize") + HARD_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def attempt(call: Callable[[], int]) -> dict[str, Any]:
    """Call, and return the fields of an `Outcome`: the status, or the exception that no message replaced."""
    try:
        return {"status": call()}
    except SystemExit as ended:
        code = ended.code
        return {"status": code if isinstance(code, int) else 0 if code is None else 1}
    except BaseException as error:
        frames = [
            (frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)
        ]
        trace = "".join(traceback.format_exception(error))[-20_000:]
        return {"error": f"{type(error).__name__}: {error}"[:500], "place": place_in(frames), "trace": trace}


def _command(arguments: Sequence[str]) -> int:
    from benchmarks.fuzzing.calls import CALLS
    from crosscut.cli import main

    if arguments and arguments[0] in CALLS:
        return CALLS[arguments[0]](*arguments[1:])
    sys.argv = ["crosscut", *arguments]
    main()
    return 0


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
