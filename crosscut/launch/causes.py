"""Explanations of rank failures that the machine caused, because memory, processes, open files or ports ran out.

PyTorch and Python report such a failure by an exception from an arbitrary place, so the traceback does not explain the
failure.
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
        "has reached the limit on processes, and could not start a process or a thread",
        "Raise the limit: `ulimit -u`, or the limit on `pids` of the container.",
    ),
    (
        ("Too many open files",),
        "has reached the limit on open files, and could not open a file or a connection",
        "Raise the limit: `ulimit -n`.",
    ),
    (
        ("Address already in use", "EADDRINUSE", "Cannot assign requested address"),
        "found no free port for its connections",
        "End programs that hold ports, or widen `net.ipv4.ip_local_port_range`.",
    ),
)
"""For each cause: texts in an exception's type or message that reveal the cause, a description of the cause, and the
remedy.
"""


def told_by_cause(place: str, kind: str, text: str, stack: str) -> str:
    """Return a message about a failed rank, to be shown instead of a traceback. Return an empty string if the machine
    did not cause the failure.

    `place` names the rank, `kind` and `text` are the type and the message of the exception, and `stack` is the
    traceback of the exception. The message names the innermost line of Crosscut's code in the traceback.
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
    """Return the cause of a rank's exception as a phrase, such as "ran out of memory", and the remedy. Return None if
    the machine did not cause the exception. `kind` is the name of the exception's type, and `text` is the exception's
    message.
    """
    told = f"{kind}: {text}"
    return next(((cause, remedy) for signs, cause, remedy in _CAUSES if any(sign in told for sign in signs)), None)
