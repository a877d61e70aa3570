"""Program that reads requests in a separate process, with limits on time and memory.

Parsing JSON and encoding a prompt hold Python's lock for as long as they take. Inside the server's own process, a
single request would therefore stop all streams, and could not be ended.

The first message on the standard input holds the served model. Each further message holds the body of one request. The
program answers each message on the standard output with the request, or with the reason why there is none. The
operating system ends the process if a request takes too long, because a process that encodes a text could not end
itself.
"""

import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from crosscut.config import CrosscutError
from crosscut.serving.protocol.fields import RequestKind, parse
from crosscut.serving.protocol.model import ServedModel
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.reading.messages import pack_request, read_request, unpack_served
from crosscut.serving.templates.program import read_message, write_message

MEMORY = 2 << 30
"""Maximum memory in bytes that a request may take while it is read. Only Linux enforces this limit."""

_SECONDS, _SECONDS_PER_MIB = 2.0, 2.0


def seconds_for(num_bytes: int) -> float:
    """Maximum processor time, in seconds, for reading a request of `num_bytes` bytes."""
    return _SECONDS + _SECONDS_PER_MIB * num_bytes / (1 << 20)


def main() -> None:
    """Read requests until the server closes the standard input."""
    first = read_message(sys.stdin.buffer)
    os.nice(first["niceness"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    served = unpack_served(first)
    for kind in first["kinds"]:
        served.load(RequestKind(kind))
    _limit_memory()
    gc.freeze()
    while (message := read_message(sys.stdin.buffer)) is not None:
        body = sys.stdin.buffer.read(message["size"])
        if len(body) < message["size"]:
            return
        signal.setitimer(signal.ITIMER_PROF, first["patience"] * seconds_for(len(body)))
        answer, content = _answer(message["kind"], body, served)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(sys.stdout.buffer, answer)
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def _answer(kind: RequestKind, body: bytes, served: ServedModel) -> tuple[Mapping[str, object], bytes]:
    """Return the answer to the server, and the bytes that follow it."""
    try:
        table, content = pack_request(read_request(kind, parse(body), served))
        return {"request": table}, content
    except Refusal as refusal:
        return {"refusal": refusal.to_json()}, b""
    except CrosscutError as error:
        return {"error": str(error)}, b""
    except Exception:  # a bug or too little memory, which the server logs
        return {"failure": traceback.format_exc()}, b""


def _limit_memory() -> None:
    """Limit the memory of this process to what it has now and `MEMORY` bytes."""
    with suppress(ValueError, OSError):  # a system without this limit
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
