"""The server of `crosscut.launch.server` in tests: it imports what most tests need, and its forks are the ranks of the
pool (`tests/ranks.py`), the ranks that `crosscut.launch` starts, and other processes of tests.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from crosscut.launch.server import start_server

_IMPORTED = (
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing",
    "crosscut.corpus",
    "crosscut.serving.server",
    "crosscut.training",
    "crosscut.training.tracking.board",
    "crosscut.verification",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "tests.brief",
)
"""Modules that the server imports, and all that they import."""


def forked() -> ForkServerContext:
    """Context of `multiprocessing` whose processes are forks of the server. The first call starts the server."""
    start_server(_IMPORTED)
    return multiprocessing.get_context("forkserver")


def started(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """A process of its own that calls `target` with a connection and the arguments, and the other end of the
    connection, through which the process tells what it does.
    """
    ours, theirs = forked().Pipe(duplex=False)
    process = forked().Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


@contextmanager
def handlers_kept(*numbers: int) -> Iterator[list[object]]:
    """Context after which the signals have the handlers that they have now. This process goes on to run other tests."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield list(handlers.values())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
