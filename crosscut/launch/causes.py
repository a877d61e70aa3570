"""Failures of a rank that the machine has caused, in words: memory, processes, open files or ports have run out.

PyTorch and Python report such a failure by an exception from an arbitrary place, so its traceback explains nothing.
"""

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FRAME = re.compile(rf'File "{re.escape(str(_PACKAGE.parent))}/({_PACKAGE.name}/[^"]+)", line (\d+), in (\S+)')

_CAUSES = (
    (
        ("MemoryError", "can't allocate memory", "Cannot allocate memory", "out of memory", "std::bad_alloc"),
        "ran out of memory",
        "Try a smaller batch or model, a smaller `training.micro_batch_size`, or `training.recompute`.",
    ),
    (
        ("can't start new thread", "Resource temporarily unavailable"),
        "could not start a process or a thread, because the limit on processes is reached",
        "Raise the limit: `ulimit -u`, or the limit on `pids` of the container.",
    ),
    (
        ("Too many open files",),
        "could not open a file or a connection, because the limit on open files is reached",
        "Raise the limit: `ulimit -n`.",
    ),
    (
        ("Address already in use", "EADDRINUSE", "Cannot assign requested address"),
        "found no free port for its connections",
        "End programs that hold ports, or widen `net.ipv4.ip_local_port_range`.",
    ),
)
"""Signs in an exception's type or message, what they mean, and the remedy."""


def told_by_cause(place: str, kind: str, text: str, stack: str) -> str:
    """Message about a failed rank without a traceback, if the machine has caused the failure. Empty otherwise.

    `place` names the rank, `kind` and `text` are the type and the message of the exception, and `stack` is its
    traceback. The message names the innermost line of Crosscut in the traceback.
    """
    found = cause_of(kind, text)
    if found is None:
        return ""
    cause, remedy = found
    frames = _FRAME.findall(stack)
    line = f" in `{frames[-1][0]}:{frames[-1][1]}` ({frames[-1][2]})" if frames else ""
    own = text.strip().splitlines()[0][:200].rstrip(".") if text.strip() else kind
    return f"{place} {cause}{line}: {own}. The other ranks were stopped. {remedy}"


def cause_of(kind: str, text: str) -> tuple[str, str] | None:
    """Cause of a rank's exception in words, such as "ran out of memory", and the remedy. None if the machine did not
    cause the exception. `kind` is the name of the exception's type, and `text` is its message.
    """
    told = f"{kind}: {text}"
    for signs, cause, remedy in _CAUSES:
        if any(sign in told for sign in signs):
            return cause, remedy
    return None
