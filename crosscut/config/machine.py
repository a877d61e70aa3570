"""Facts of the machine and of a process's parent, for rooms that never import each other.

`data` starts processes that tokenize and `parallel` starts ranks.
"""

import multiprocessing
import os
import platform
import threading
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """The processor as its maker calls it, or its kind where the system does not tell."""
    return _processor_fact("model name") or platform.processor() or platform.machine()


def processor_vendor() -> str:
    """Maker of an x86 processor, such as "AuthenticAMD"; empty where neither the processor nor the system names it."""
    return _processor_fact("vendor_id") or platform.processor().partition(", ")[2]  # the latter on Windows


def _processor_fact(name: str) -> str:
    """The first core's `name` in Linux's /proc/cpuinfo; empty on other systems and where Linux gives none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def leave_with_parent() -> None:
    """From now on, end this process at once when the process that spawned it is gone, even by SIGKILL.

    Else it would go on working, and writing, beside the run that is started in its place. Does nothing in a process
    that `multiprocessing` did not start.
    """
    threading.Thread(target=_wait_for_parent, daemon=True, name="leave with parent").start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
