"""Limits on the time and the memory of ranks that run other people's code.

A wrong cut often ends in a rank that waits for a message that no other rank sends. The rank then cannot end by itself.
"""

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch import nn

from crosscut.config import TrainingError
from crosscut.config.system.machine import available_memory
from crosscut.launch.processes import leave_with_error

SECONDS = 600.0
"""Time that a proof may take, unless the user gives another."""

_STATUS_FILE = Path("/proc/self/statm")
_DATA_FIELD = 5  # pages of private memory that can be written


@dataclass(frozen=True)
class Limits:
    """Limits on one rank."""

    seconds: float
    """Time in seconds, as on a clock."""
    memory: int
    """Memory in bytes that the rank may add to the memory it has. Only Linux enforces this limit."""

    @classmethod
    def on(cls, num_ranks: int, seconds: float = SECONDS) -> "Limits":
        """Limits with which `num_ranks` ranks together do not need more memory than this machine has."""
        return cls(seconds, available_memory() // num_ranks)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which the limits apply to this process. If the time ends, the process ends, and its error is that
        of the rank.
        """
        timer = threading.Timer(self.seconds, _end, (threading.get_ident(), self.seconds))
        timer.daemon = True
        before = resource.getrlimit(resource.RLIMIT_DATA)
        if _STATUS_FILE.exists():
            pages = int(_STATUS_FILE.read_text(encoding="ascii").split()[_DATA_FIELD])
            most = pages * resource.getpagesize() + self.memory
            if before[0] == resource.RLIM_INFINITY or most < before[0]:
                resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            resource.setrlimit(resource.RLIMIT_DATA, before)


def _end(thread: int, seconds: float) -> NoReturn:
    """End this process, whose main thread `thread` has used up its time."""
    told = (
        f"The proof must end within {seconds:g} s, but rank {os.environ.get('RANK', '0')} was then still "
        f"{_place(sys._current_frames().get(thread))}. If the model is large, allow more time (`--seconds`). "
        "Otherwise, a rank waits for a message: check whether all ranks send the same messages in the same order."
    )
    leave_with_error(TrainingError(told))


def _place(frame: FrameType | None) -> str:
    """Describe the line that a thread executes, and the innermost module whose method the line is in."""
    if frame is None:
        return "at an unknown place"
    line = f"at {frame.f_code.co_filename}:{frame.f_lineno}"
    modules: list[nn.Module] = []
    at: FrameType | None = frame
    while at is not None:
        if isinstance(module := at.f_locals.get("self"), nn.Module):
            modules.append(module)
        at = at.f_back
    if not modules:
        return f"{line}, outside of the modules"
    names = {id(module): name for name, module in modules[-1].named_modules()}
    return f"{line}, in the module `{names.get(id(modules[0])) or type(modules[0]).__name__}`"
