"""Server process that imports PyTorch once and forks the ranks of `processes.launch`.

The imports of a new Python process take two to three seconds. A fork of a process that has already done these imports
starts within milliseconds and shares the memory of the imported code. The server is `multiprocessing`'s fork server: it
runs no other code and never touches a GPU, so a fork is safe. Ctrl-C reaches all processes of a terminal. The server
blocks it, and so does a fork until its imports are done. The caller waits for the server's imports before it makes the
semaphores that its ranks open, because a fork whose caller has gone would not find them.

A fork inherits the environment variables and the output streams of the server, which may be out of date. `start_ranks`
therefore gives each rank the environment variables and output streams of the caller. On systems other than Linux, where
libraries may not survive a fork, ranks are new processes.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.resource_sharer import DupFd
from multiprocessing.util import register_after_fork
from typing import Self

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

FORKS = sys.platform == "linux"
"""Whether ranks are forks of the server."""

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that may reach all processes of a run at once. The server ignores these signals, so that it outlives its
ranks.
"""

_MARK = "CROSSCUT_IS_SERVER"
"""Environment variable that is set only in the server, while the server imports this module."""


def start_server(modules: Iterable[str] = ()) -> None:
    """Start the server if it is not running, and return at once. The server then imports `modules` while this process
    does other work. Does nothing on systems where ranks are new processes.
    """
    if not FORKS:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the server imports the same files
    resource_tracker.ensure_running()  # which would unblock the signal
    with _interrupts_blocked():  # in the server, too, so its imports go on
        os.environ[_MARK] = "1"
        try:
            forkserver.ensure_running()
        finally:
            del os.environ[_MARK]
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # raises a Ctrl-C that waits


@cache
def _wait_for_server() -> None:
    """Wait until the server has done its imports. Ctrl-C ends the wait."""
    fork = multiprocessing.get_context("forkserver").Process(target=_do_nothing, daemon=True)
    fork.start()  # returns when the server has answered
    fork.join()


def _do_nothing() -> None:
    pass


def start_ranks(
    entry: Callable[..., object],
    arguments: tuple[object, ...],
    environments: Mapping[int, Mapping[str, str]],
    logs: str,
) -> PContext:
    """Start one process for each rank in `environments`, which maps each rank to its additional environment variables.
    Each process calls `entry(*arguments)`. `logs` is an existing folder for PyTorch's files.
    """
    start = partial(start_processes, "crosscut", logs_specs=DefaultLogsSpecs(log_dir=logs))
    if not FORKS:
        envs = {rank: dict(more) for rank, more in environments.items()}
        return start(entry, dict.fromkeys(environments, arguments), envs, start_method="spawn")
    start_server([entry.__module__])
    _wait_for_server()
    envs = {rank: {**os.environ, **more} for rank, more in environments.items()}
    with ExitStack() as outputs, _interrupts_blocked():
        streams = tuple(outputs.enter_context(PassedStream(number)) for number in (1, 2))
        own = {rank: (entry, arguments, set(envs[rank]), streams) for rank in envs}
        return start(_in_fork, own, envs, start_method="forkserver")


def _in_fork(
    entry: Callable[..., object], arguments: tuple[object, ...], names: set[str], streams: tuple[int, ...]
) -> object:
    """Call `entry` in a fork in which `start_processes` has set the caller's environment variables (`names`).

    Before the call, remove all other variables, which the fork has from the server, and redirect the output to
    `streams`, the caller's output streams.
    """
    for name in os.environ.keys() - names:
        if not name.startswith("TORCHELASTIC_"):  # set by `start_processes`
            del os.environ[name]
    for theirs, ours in zip(streams, (1, 2), strict=True):
        os.dup2(theirs, ours)
        os.close(theirs)
    return entry(*arguments)


class PassedStream:
    """Copy of an open file descriptor that can be passed to a process of the fork server. The process receives the
    number of its own descriptor.
    """

    def __init__(self, number: int) -> None:
        """Copy the descriptor `number`."""
        self._number = os.dup(number)

    def __enter__(self) -> Self:
        """Return the copy, which can be an argument of a new process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the copy in this process."""
        os.close(self._number)

    def __reduce__(self) -> tuple[Callable[..., int], tuple[object]]:
        return _number_here, (reduction.DupFd(self._number),)


def _number_here(duplicate: DupFd) -> int:
    try:
        return duplicate.detach()
    except (EOFError, ConnectionError, FileNotFoundError):
        os._exit(1)  # the caller has gone


def _set_endings(action: signal.Handlers) -> None:
    for number in _ENDING:
        signal.signal(number, action)


def _unblock_interrupts(_server: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


if os.environ.pop(_MARK, ""):
    _set_endings(signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an import that makes a lock starts a tracker, which unblocks it
    os.register_at_fork(after_in_child=partial(_set_endings, signal.SIG_DFL))
    register_after_fork(start_server, _unblock_interrupts)  # called when a fork has unpickled its function
