"""Access to PyTorch's Flight Recorder in this process.

PyTorch records the collectives of gloo and of NCCL in memory (`TORCH_FR_BUFFER_SIZE` entries, 2,000 by default; 0 turns
the recorder off). The functions that return the entries are not public, and a version of PyTorch may lack them.
"""

from collections.abc import Sequence
from contextlib import suppress

from torch._C import _distributed_c10d as c10d

from crosscut.flight.traces import Trace, read_dump
from crosscut.parallel.collectives import ranks_of

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Names of the functions that return the entries as JSON. The first function covers gloo and other backends, and the
second one covers NCCL.
"""


def own_traces(since: int) -> list[Trace]:
    """Return the collectives that PyTorch's Flight Recorder has recorded in this process since the time `since`, in
    nanoseconds since 1970. There is one `Trace` per process group.

    The list is empty if the recorder is off, or if this version of PyTorch has no recorder or uses another format.
    """
    found: dict[tuple[object, ...], Trace] = {}
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        with suppress(RuntimeError, ValueError):
            traces = [] if dump is None else read_dump(dump(), _members, since)
            found |= {trace.key: trace for trace in traces}
    return list(found.values())


def _members(group_name: str) -> Sequence[int]:
    """Return the ranks of a process group. Empty if the group has been destroyed."""
    with suppress(RuntimeError, ValueError, KeyError):
        return ranks_of(group_name)
    return ()
