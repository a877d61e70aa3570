"""Ranks that torchrun started and that the layout does not need: they wait until the other ranks have ended.

torchrun counts a rank that ends early as a failure if its status is not 0, and a node whose ranks have all ended leaves
the run. An idle rank therefore waits for a key in the store of the process group, which the first rank sets at the end.
An idle rank sends nothing to other ranks, and is no part of the process group.
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
"""Key of the number of idle ranks that have started to wait."""
_PATIENCE = timedelta(days=365)
_LEAVING = 10.0
"""Maximum number of seconds for which the first rank, which may host the store, waits for the idle ranks."""
_POLL = 0.05


def is_idle(num_ranks: int) -> bool:
    """Whether this rank is not among the first `num_ranks` of the ranks that torchrun started."""
    return int(os.environ["RANK"]) >= num_ranks


def wait_as_idle() -> NoReturn:
    """Wait until the first rank has ended, and exit: with 0 after `told_of_the_end`, with 1 if the run failed."""
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
    """Context of the work of the first `num_ranks` ranks, inside the process group. When the context ends without an
    error, the first rank lets the idle ranks end, and waits until they have read the message.
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
    """New connection to the store of the process group."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
