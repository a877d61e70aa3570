"""Idle ranks: ranks that torchrun started and that the layout does not need. They wait until the other ranks have
ended.

An idle rank cannot simply exit. torchrun counts an early exit with a status other than 0 as a failure, and a node whose
ranks have all ended leaves the run. An idle rank therefore waits until the first rank, at its end, sets a key in the
store of the process group. An idle rank sends nothing to other ranks and is not part of the process group.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from crosscut.config.system.terminal import echo
from crosscut.launch.processes import started_world_size

_ENDED, _LEFT = "crosscut/ended", "crosscut/idle_ranks_left"
WAITING = "crosscut/idle_ranks_waiting"
"""Key in the store for the number of idle ranks that have started to wait."""
_PATIENCE = timedelta(days=365)
_LEAVING = 10.0
"""Maximum number of seconds that the first rank, which may host the store, waits for the idle ranks to end."""
_POLL = 0.05


def is_idle(num_ranks: int) -> bool:
    """Whether this rank is idle: not among the first `num_ranks` of the ranks that torchrun started."""
    return int(os.environ["RANK"]) >= num_ranks


def wait_as_idle() -> NoReturn:
    """Wait until the first rank announces the end of the run (`told_of_the_end`), then exit with status 0. If the run
    fails, exit with status 1.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to stop, which the other ranks agree on
    try:
        store = _store()
        store.add(WAITING, 1)
        store.wait([_ENDED], _PATIENCE)
        store.add(_LEFT, 1)
    except dist.DistError:
        rank = os.environ["RANK"]
        echo(f"crosscut: rank {rank}, which was idle, stopped because another rank failed.", err=True)
        sys.exit(1)
    sys.exit(0)


@contextmanager
def told_of_the_end(num_ranks: int) -> Iterator[None]:
    """Context in which the first `num_ranks` ranks do their work, inside the process group. When the context ends
    without an error, the first rank announces the end to the idle ranks, and waits until they have received the
    message.
    """
    yield
    idle = started_world_size() - num_ranks
    if idle <= 0 or is_idle(1):
        return
    store, deadline = _store(), time.monotonic() + _LEAVING
    store.set(_ENDED, "1")
    while store.add(_LEFT, 0) < idle and time.monotonic() < deadline:
        time.sleep(_POLL)


def _store() -> dist.TCPStore:
    """Return a new connection to the store of the process group."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
