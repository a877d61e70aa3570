"""Processes that benchmarks start: their sessions and ends, their ports, and the memory that they hold."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil


@contextmanager
def session(command: Sequence[str], log: Path, **variables: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Command in a session of its own, whose process group can be killed. The log gets its output. On exit, no process
    is left. The process gets further environment variables.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **variables}, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def port_of(process: "subprocess.Popen[bytes]", said: Callable[[], str]) -> int:
    """Port on the loopback address of a server that has said so. Ends this program if the server does not start."""

    def found() -> re.Match[str] | None:
        return re.search(r"http://127\.0\.0\.1:(\d+)", said())

    wait_until(lambda: bool(found()) or process.poll() is not None, 120, every=0.05)
    if not (address := found()):
        sys.exit(f"The server must start, but did not:\n{said()}")
    return int(address[1])


def told_in(log: Path, most: int = 4000) -> str:
    """End of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-most:] if log.exists() else ""


def is_running(process: psutil.Process) -> bool:
    """Whether a process is alive. A zombie is not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def have_ended(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Whether all processes end within `seconds`."""
    return wait_until(lambda: not any(map(is_running, processes)), seconds, every=0.01)


def wait_until(condition: Callable[[], bool], seconds: float, *, every: float = 0.002) -> bool:
    """Whether a condition holds within `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def free_port() -> int:
    """Port of the loopback address that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def join_ranks(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Environment variables of one of several ranks on this machine."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    names |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {name: str(value) for name, value in names.items()}


class Peak:
    """Watch the memory of a process and its descendants until `stop` is called."""

    def __init__(self, process: int, *, every: float = 0.5) -> None:
        self._process, self._every = process, every
        self._highest = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop watching and return the peak in bytes."""
        self._over.set()
        self._thread.join()
        return self._highest

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self._highest = max(self._highest, held_by(self._process))


def held_by(process: int) -> int:
    """Bytes that a process and its descendants hold. A page shared by n processes counts 1/n in each (PSS)."""
    try:
        parent = psutil.Process(process)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_bytes_in(Path(f"/proc/{one.pid}/smaps_rollup"), "Pss") for one in family)


class Used(NamedTuple):
    """Time and memory that a command and all its processes have used."""

    seconds: float
    cpu: float
    peak_bytes: int


def measure_command(command: Sequence[str], *, environment: dict[str, str] | None = None, quiet: bool = False) -> Used:
    """Run a command that must succeed."""
    started, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL if quiet else None, env=environment)
    peak = Peak(process.pid, every=0.1)
    if process.wait():
        sys.exit(f"`{' '.join(command)}` must end well, but exited with {process.returncode}.")
    seconds, using = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = using.ru_utime + using.ru_stime - used.ru_utime - used.ru_stime
    return Used(seconds, cpu, peak.stop())


def memory_of(process: int | str, name: str) -> int:
    """Bytes of a process, or of "self", in its status: `VmRSS`, its peak `VmHWM` or `VmSize`. 0 if it has ended."""
    return _bytes_in(Path(f"/proc/{process}/status"), name)


def reset_peak(process: int | str) -> None:
    """Let the peak of a process, or of "self", start anew."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def _bytes_in(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
