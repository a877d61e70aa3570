"""The server of `crosscut.launch.server` in tests: it imports what most tests need, and its forks are the ranks of the
pool (`tests/ranks.py`), the ranks that `crosscut.launch` starts, and other processes of tests.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

from crosscut.launch.server import start_server

_IMPORTED = (
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing",
    "crosscut.corpus",
    "crosscut.serving.server",
    "crosscut.training",
    "crosscut.training.watching.board",
    "crosscut.verification",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
)
"""Modules that the server imports, and all that they import."""


def forked() -> ForkServerContext:
    """Context of `multiprocessing` whose processes are forks of the server. The first call starts the server."""
    start_server(_IMPORTED)
    return multiprocessing.get_context("forkserver")
