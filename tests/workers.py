"""Worker processes of a corpus and of a tokenizer as forks of the server (`tests/nursery.py`), which has imported all
that they need. A process that Crosscut spawns imports the same for about a second.
"""

import signal
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType, SimpleNamespace

import pytest

from tests.nursery import forked


class _Worker(ForkServerProcess):
    def run(self) -> None:
        """Run as in a spawned process: the server ignores the signal by which workers are stopped."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().run()


class _Context(ForkServerContext):
    Process = _Worker


def fork_workers(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let `module` fork the processes that it would spawn."""

    def get_context(_method: str) -> _Context:
        forked()
        return _Context()

    patch.setattr(module, "multiprocessing", SimpleNamespace(get_context=get_context))
