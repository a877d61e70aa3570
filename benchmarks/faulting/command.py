"""The real `crosscut` command with the places of `inside.py`: in a new process, or in a fork.

    python -m benchmarks.faulting.command train ...

The server of `crosscut.launch` forks the commands as well as their ranks. It has imported everything, which saves
seconds for each of the hundreds of runs of `benchmarks/faults.py`.
"""

import multiprocessing.process
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from benchmarks.faulting.inside import install
from crosscut.launch.server import PassedStream, start_server

_IMPORTED = ("crosscut.cli.main", "crosscut.training.job", "tensorboard.compat.proto.event_pb2",
             "torch.distributed.checkpoint", "benchmarks.faulting.inside")  # fmt: skip


def main() -> None:
    """Run one command."""
    from crosscut.cli import main as crosscut

    start_forking()
    install(None)
    crosscut()


def start_forking(**environment: str) -> None:
    """Start the server with these environment variables. Each rank then puts the places into itself."""
    with patch.dict(os.environ, FAULTS_SERVER="1", **environment):
        start_server(_IMPORTED)


def fork(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> BaseProcess:
    """Run a command in a fork of the server, which leads a group of its own. The log gets its output."""
    vars(sys.modules["__main__"]).update(__file__=None)  # the fork does not import the benchmark again
    with log.open("ab") as file, PassedStream(file.fileno()) as output:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_run, args=(arguments, environment, output))
        process.start()
    return process


def _run(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> None:
    """Run the command in this fork."""
    from crosscut.cli import main as crosscut

    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # which the server ignores
        signal.signal(number, signal.SIG_DFL)
    multiprocessing.process._parent_process = None  # no rank of a launching process
    # The ranks are forks of the same server. `multiprocessing` would start another one.
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    os.environ.update(environment)
    sys.argv = ["crosscut", *arguments]
    install(None)
    crosscut()


if __name__ == "__main__":
    main()
