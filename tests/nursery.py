"""A server process that has imported PyTorch and Crosscut and forks ranks from itself.

A new Python process spends two to three seconds of a core on imports before its first line of work; a fork of a process
that has imported everything starts in milliseconds. `forked` gives the `multiprocessing` context of the server. The
fixture `forked_ranks` (`tests/conftest.py`) lets `crosscut.launch` start its ranks from the server too, in tests that
are about what the ranks do and not about how they are started.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext
from typing import Any, Self

_IMPORTED = (
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing",
    "crosscut.training",
    "crosscut.verification",
)
"""Modules that the server imports, and all that they import."""


def forked() -> ForkServerContext:
    """The context whose processes are forks of the server; the first call starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # import what this process imports
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def start_forked(
    start_processes: Callable[..., Any],
    *,
    entrypoint: Callable[..., Any],
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    **options: Any,
) -> Any:
    """PyTorch's `start_processes`, with forks of the server in place of new processes.

    A new process has the environment and the output of the process that starts it. A fork has the server's, and takes
    those over first.
    """
    forked()
    all_envs = {rank: {**os.environ, **env} for rank, env in envs.items()}
    with Descriptor(1) as out, Descriptor(2) as err:
        all_args = {rank: (entrypoint, given, set(all_envs[rank]), (out, err)) for rank, given in args.items()}
        options |= {"args": all_args, "envs": all_envs, "start_method": "forkserver"}
        return start_processes(entrypoint=_as_if_new, **options)


def _as_if_new(
    entrypoint: Callable[..., Any], arguments: tuple[Any, ...], names: set[str], outputs: tuple[int, int]
) -> Any:
    """In the fork, whose `envs` are set: forget what else the server's environment has, take over the output, work."""
    for name in os.environ.keys() - names:
        if not name.startswith("TORCHELASTIC_"):  # set by `start_processes`
            del os.environ[name]
    for theirs, ours in zip(outputs, (1, 2), strict=True):
        os.dup2(theirs, ours)
    return entrypoint(*arguments)


class Descriptor:
    """A copy of an open file descriptor of this process that arrives in a started process as that process's number."""

    def __init__(self, number: int) -> None:
        self._number = os.dup(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _number_here, (reduction.DupFd(self._number),)


def _number_here(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number
