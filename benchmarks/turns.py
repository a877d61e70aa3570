"""Shared parts of the benchmarks whose contenders are processes that work in turns."""

import resource
import sys
from dataclasses import dataclass

CORES = 2
"""Threads of a contender, over all its processes."""


@dataclass(frozen=True)
class Failure:
    """Answer of a contender that cannot run: the reason."""

    reason: str


def peak_bytes() -> int:
    """Peak of this process's resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
