"""PyTorch's Flight Recorder of this process.

PyTorch records the collectives of gloo and of NCCL in memory (`TORCH_FR_BUFFER_SIZE` entries, 2,000 by default; 0 turns
the recorder off). The functions that return the entries have no public name, and may be missing.
"""

from collections.abc import Sequence
from contextlib import suppress

from torch._C import _distributed_c10d as c10d

from crosscut.flight.traces import Trace, read_dump
from crosscut.parallel.collectives import ranks_of

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions that return the entries as JSON: of gloo and other backends, and of NCCL."""


def own_traces(since: int) -> list[Trace]:
    """Collectives of this process in PyTorch's Flight Recorder, group by group. `since` is the time of the first
    collective that counts, in nanoseconds since 1970. Empty if the recorder is off, or if
    this version of PyTorch has no recorder or another form of entries.
    """
    found: dict[tuple[object, ...], Trace] = {}
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        with suppress(RuntimeError, ValueError):
            traces = [] if dump is None else read_dump(dump(), _members, since)
            found |= {trace.key: trace for trace in traces}
    return list(found.values())


def _members(group_name: str) -> Sequence[int]:
    """Ranks of a process group; empty if the group has been destroyed."""
    with suppress(RuntimeError, ValueError, KeyError):
        return ranks_of(group_name)
    return ()
