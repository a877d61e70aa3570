"""Facts about the machine and the parent process, and a limit on the processes that a command starts. The packages
`corpus` and `data` (which start processes that read and tokenize) and `launch` (which starts ranks) share this module,
because these packages do not import each other.
"""

import multiprocessing
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

from crosscut.config.errors import ConfigError, CrosscutError

_PROCESSES_PER_CORE = 32
"""Maximum number of processes per core. A process needs about 3 seconds of a core to import PyTorch, so 32 processes
per core take a minute and a half to start. More processes would only wait for each other."""

_BYTES_PER_PROCESS = 192 << 20
"""Memory of a process that has imported PyTorch and computes nothing."""


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Size of the memory that the processes of this machine or container may use, in bytes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # not Linux, not a container, or "max"
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return memory


def require_room(name: str, num_processes: int, *, remedy: str, error: type[CrosscutError] = ConfigError) -> None:
    """Raise `error` if this machine has too few cores or too little memory for `num_processes` processes. The message
    names the setting by `name` and ends with `remedy`. Call this before the first process starts.
    """
    cores, memory = available_cores(), available_memory()
    most = max(1, min(_PROCESSES_PER_CORE * cores, memory // _BYTES_PER_PROCESS))
    if num_processes > most:
        raise error(
            f"{name} must be at most {most:,} on this machine, but is {num_processes:,}. The machine has too few cores "
            f"({cores}) or too little memory ({memory / 1e9:.0f} GB) for {num_processes:,} processes. {remedy}"
        )


def processor_name() -> str:
    """Name of the processor as its maker gives it. If the system does not provide the name, the processor's
    architecture is returned.
    """
    return _processor_fact("model name") or platform.processor() or platform.machine()


def processor_vendor() -> str:
    """Maker of an x86 processor, such as "AuthenticAMD". Empty if neither the processor nor the system names a
    maker.
    """
    return _processor_fact("vendor_id") or platform.processor().partition(", ")[2]  # the second source works on Windows


def _processor_fact(name: str) -> str:
    """Value of `name` for the first core in Linux's /proc/cpuinfo. Empty on other systems and if Linux does not list
    `name`.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def machine_identity() -> str:
    """Identity of the environment in which process numbers are valid: the machine, its last start, and the container.
    Two processes that get the same text can find each other by process number.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [boot.read_text(encoding="utf-8").strip() if boot.exists() else platform.node()]
    return " ".join([*parts, str(namespace.readlink())] if namespace.exists() else parts)


def process_start(pid: int) -> str | None:
    """Start time of a running process, in the system's units. Empty if the system does not give the time, and None if
    there is no such process. A number together with a start time identifies a process, because numbers are reused.
    """
    try:
        with suppress(PermissionError):  # another user's process
            os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except ProcessLookupError:
        return None
    except FileNotFoundError:  # the process has ended just now, or the system has no /proc
        return None if Path("/proc/self").exists() else ""
    state, *rest = stat.rpartition(")")[2].split()  # the name before the last parenthesis may contain anything
    return None if state == "Z" else rest[18]


def leave_with_parent() -> None:
    """End this process as soon as its parent process ends, even if the parent is killed by SIGKILL.

    Without this call, the process would continue to write files after the end of the run, when a new run may write the
    same files. The call has no effect in a process that `multiprocessing` did not start.
    """
    threading.Thread(target=_wait_for_parent, daemon=True, name="leave with parent").start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
