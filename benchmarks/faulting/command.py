"""The real `crosscut` command in a process of its own, with the places of `inside.py`.

    python -m benchmarks.faulting.command train ...      # one command
    python -m benchmarks.faulting.command --serve        # forks a process for each job that standard input names

A fork of this process has imported everything, which saves seconds for each of the hundreds of runs of
`benchmarks/faults.py`. A job is one line of JSON: `arguments`, `environment`, `log`. The answers are two lines: the
number of the process when it starts, and the number and its exit status when it has ended.
"""

import json
import os
import sys
from multiprocessing import forkserver
from typing import Any, NoReturn

from crosscut.launch.server import start_server

_IMPORTED = ("crosscut.training.job", "torch.distributed.checkpoint", "benchmarks.faulting.inside")


def main() -> None:
    """Run one command, or serve."""
    os.environ["FAULTS_SERVER"] = "1"
    start_server(_IMPORTED)
    del os.environ["FAULTS_SERVER"]
    import crosscut.training.job
    from benchmarks.faulting.inside import install
    from crosscut.cli import main as crosscut

    if sys.argv[1:] != ["--serve"]:
        install(None)
        crosscut()
        return
    import tensorboard.compat.proto.event_pb2  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    for line in sys.stdin:
        _answer(json.loads(line))


def _answer(job: dict[str, Any]) -> None:
    """Fork a process for a job and wait for its end."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run(job)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(pid, os.waitstatus_to_exitcode(status), flush=True)


def _share_server() -> None:
    """Let this fork use the server of its parent. `multiprocessing` would wait for the server as for a child."""
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def _run(job: dict[str, Any]) -> NoReturn:
    """Run the command of a job in this fork."""
    from benchmarks.faulting.inside import install
    from crosscut.cli import main as crosscut

    _share_server()
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, stream)
    os.environ.update(job["environment"])
    sys.argv = ["crosscut", *job["arguments"]]
    status: object = 0
    try:
        install(None)
        crosscut()
    except SystemExit as ended:
        status = ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
