"""Start and end the server's helper processes, which render chat templates and read requests."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import crosscut

_PASSED_ON = ("PATH", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
"""Environment variables that a helper process inherits. Other variables may hold secrets, such as the server's key."""


def start_process(
    arguments: list[str], variables: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.Popen[bytes]":
    """Start this Python with `arguments`, with pipes to its standard input and output. `variables` are further
    environment variables.

    The process has a process group of its own, because Ctrl-C at the terminal is for the server, which still answers
    requests. It remains in the server's session: Linux may share the processor between sessions, and a low priority
    would then not hold against the server.
    """
    inherited = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return subprocess.Popen(  # noqa: S603 - this Python with our own program
        [sys.executable, "-P", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**inherited, **variables},
        process_group=0,
    )


def importing_crosscut() -> dict[str, str]:
    """Environment variables with which a process imports the same Crosscut as this process."""
    paths = [str(Path(crosscut.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """End a process that is no longer needed."""
    process.kill()
    process.communicate()
