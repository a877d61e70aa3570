"""Starting and joining the processes of a run.

A rank learns its place from the environment, in torchrun's words (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
Under torchrun, or anything that speaks like it, a command joins what was started; otherwise `launch` starts the ranks of
one machine in the same words. When a rank fails, the others are stopped and the user sees that one rank's traceback.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import ProcessFailure

from crosscut.config import CrosscutError, errors

_LOOPBACK = "127.0.0.1"


class RankFailure(Exception):  # noqa: N818 - it tells what happened, as ProcessFailure does
    """A rank ended with an exception or a signal; the message is that rank's traceback."""


def was_started() -> bool:
    """Whether torchrun or the like started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_world_size() -> int:
    """The number of ranks that were started, 1 where none were."""
    return int(os.environ["WORLD_SIZE"]) if was_started() else 1


def is_first_started() -> bool:
    """Whether this is the first of the started ranks, or the only process."""
    return not was_started() or int(os.environ["RANK"]) == 0


def choose_device(name: str) -> torch.device:
    """The device of this rank for `cpu`, `cuda` or `auto`."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The process group of this run: the started ranks, or this process alone. Uses gloo on the CPU, nccl on CUDA."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _share_cores()
    if was_started():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _share_cores() -> None:
    """Give each rank of this machine an equal share of its cores; torchrun would leave each with one."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1)


def launch(function: Callable[..., None], arguments: tuple[Any, ...], *, num_ranks: int) -> None:
    """Run `function(*arguments)` in `num_ranks` processes of this machine; in this process when it is one.

    `function` must be importable by name. Raises the user error that a rank raised, or `RankFailure` with the traceback
    of the rank that failed first; the other ranks are stopped.
    """
    if num_ranks == 1:
        function(*arguments)
        return
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ranks = range(num_ranks)
    context = start_processes(
        name="crosscut",
        entrypoint=function,
        args=dict.fromkeys(ranks, arguments),
        envs={rank: _environment(rank, num_ranks, store.port) for rank in ranks},
        logs_specs=DefaultLogsSpecs(),
        start_method="spawn",
    )
    try:
        result = context.wait()
    finally:
        context.close(signal.SIGTERM, timeout=5)
    if result is not None and result.is_failed():
        _raise_first(result.failures, num_ranks)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the launching process serves the store
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {name: str(value) for name, value in environment.items()}


def _raise_first(failures: dict[int, ProcessFailure], num_ranks: int) -> None:
    """Raise for the rank that failed first, leaving out those that only lost their connection to it."""
    causes = [f for f in failures.values() if not _is_lost_connection(str(f.message))] or list(failures.values())
    first = min(causes, key=lambda f: f.timestamp)
    told = first.error_file_data.get("message", {})
    if not isinstance(told, dict):
        told = {}
    kind, _, text = str(told.get("message", "")).partition(": ")
    user_error = getattr(errors, kind, None)
    if isinstance(user_error, type) and issubclass(user_error, CrosscutError):
        raise user_error(text)
    place = f"rank {first.local_rank} of {num_ranks}"
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        hint = " This is often the system running out of memory." if name == "SIGKILL" else ""
        raise RankFailure(f"{place} was ended by {name}.{hint}")
    stack = told.get("extraInfo", {}).get("py_callstack", str(first.message))
    raise RankFailure(f"{stack.rstrip()}\n{place} failed as above; the other ranks were stopped.")


def _is_lost_connection(message: str) -> bool:
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Connection refused",
        "DistNetwork",
    )
    return any(sign in message for sign in signs)


@contextmanager
def joined_rank() -> Iterator[None]:
    """Around the work of a rank that torchrun started: show the traceback of the rank at fault, and only that.

    A rank that merely lost its connection to another waits a little, so that the cause is printed first and torchrun
    can stop it, and then leaves with one line.
    """
    try:
        yield
    except CrosscutError:
        raise
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        if _is_lost_connection(str(error)) or isinstance(error, dist.DistNetworkError):
            time.sleep(3)
            print(f"crosscut: rank {rank} stopped, since another rank did.", file=sys.stderr)  # noqa: T201
        else:
            traceback.print_exc()
            print(f"crosscut: rank {rank} failed as above.", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(1)
