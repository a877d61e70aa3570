"""Starting and joining the processes of a run.

A rank learns its place from the environment, in torchrun's words (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
Under torchrun, or anything that speaks like it, a command joins what was started; otherwise `launch` starts the ranks
of one machine in the same words. When a rank fails, the others are stopped and the user sees that one rank's traceback.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from crosscut.config import ConfigError, CrosscutError, LayoutError, RankFailure, errors
from crosscut.config.machine import available_cores, leave_with_parent
from crosscut.launch.heap import give_freed_tensors_back
from crosscut.launch.stopping import REQUESTS, SAME_REQUEST

_T = TypeVar("_T")

_LOOPBACK = "127.0.0.1"

_WAIT_FOR_CAUSE = 5.0
"""Seconds that a rank which lost its connection waits, so that the rank at fault is seen to fail first."""

_POLL = 0.1
"""Seconds between two looks at the ranks."""


def was_started() -> bool:
    """Whether torchrun or the like started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_world_size() -> int:
    """The number of ranks that were started, 1 where none were."""
    return int(os.environ["WORLD_SIZE"]) if was_started() else 1


def ranks_on_this_machine(world_size: int) -> int:
    """Number of a run's ranks on this machine: the number that torchrun gives; without torchrun, all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if was_started() else world_size


def is_first_started() -> bool:
    """Whether this is the first of the started ranks, or the only process."""
    return not was_started() or int(os.environ["RANK"]) == 0


def choose_device(name: str) -> torch.device:
    """The device of this rank for `cpu`, `cuda` or `auto`."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def has_too_few_gpus(num_ranks: int) -> bool:
    """Whether this machine has GPUs, but not one for each of `num_ranks` ranks that are to be started here."""
    return not was_started() and 0 < torch.cuda.device_count() < num_ranks


def require_devices(name: str, num_ranks: int) -> None:
    """Raise unless this machine has a device for each of `num_ranks` ranks: `ConfigError` or `LayoutError`."""
    num_devices = torch.cuda.device_count()
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("`training.device` must be a device that is there, but is cuda and there is none. Try cpu.")
    if choose_device(name).type == "cuda" and num_ranks > num_devices:
        raise LayoutError(
            f"`layout.tensor` x `layout.data` must be at most this machine's {num_devices} CUDA devices, but is "
            f"{num_ranks}. Choose a smaller layout, start with torchrun on several machines, or set "
            "`training.device` to cpu."
        )


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Around all that a rank does with others: a process group of the started ranks, or of this process alone.

    On the CPU it uses gloo, and all ranks compute with as many threads as the one that has the fewest; on CUDA nccl for
    tensors on devices, gloo for those on the host, and `device` becomes the current one. After an error the group of
    several ranks is left as it is, so that no rank waits for one that failed and the error is seen: the process must
    end then.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # messages begin before products that run beside them
    if was_started():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cpu":
        _take_as_many_threads()
        give_freed_tensors_back()
    try:
        yield
    except BaseException:
        # Taking the group apart may wait for the other ranks; a rank that failed must not, so that its error is seen.
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def keep_process_group(device: torch.device) -> None:
    """The process group that there is, or else one as `process_group` makes it, until this process ends.

    For a program that is not ours; where an uncaught error ends it the group is left as it is.
    """
    if dist.is_initialized():
        return
    group = process_group(device)
    group.__enter__()
    atexit.register(lambda: hasattr(sys, "last_value") or group.__exit__(None, None, None))


def share_cores() -> None:
    """Let torch compute with this rank's share of the cores that it may run on, at least one thread.

    The cores are divided by `LOCAL_WORLD_SIZE`, by 1 where that is not set; what `OMP_NUM_THREADS` says, such as the
    1 that torchrun sets, no longer holds. A rank that was bound to cores of its own should be started without it.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, available_cores() // ranks))


def _take_as_many_threads() -> None:
    """Let every rank compute with the fewest threads that any of them has.

    A kernel's sums depend in their last bits on how many threads share them, so copies on machines with different
    numbers of cores would drift apart.
    """
    threads = torch.tensor([torch.get_num_threads()])
    dist.all_reduce(threads, dist.ReduceOp.MIN)
    torch.set_num_threads(int(threads))


def launch(
    function: Callable[..., _T], arguments: tuple[Any, ...], *, num_ranks: int, signals: tuple[int, ...] = REQUESTS
) -> _T:
    """Run `function(*arguments)` in `num_ranks` processes of this machine; in this process when it is one.

    `function` must be importable by name, and return something that can be pickled; the first rank's is returned.
    Raises the user error that a rank raised, or `RankFailure` with the traceback of the rank at fault; the other ranks
    are stopped.

    The first SIGTERM or SIGUSR1 is passed on to the ranks (see `stopping`), which then are waited for. An interrupt or
    a second SIGTERM stops them all at once, as does the first where a rank takes no requests: `SystemExit` with 128 +
    the signal. The ranks also end when this process is killed. `signals` may name SIGINT beside the two that are passed
    on; then a second interrupt is the one that stops them all.
    """
    if num_ranks == 1:
        return function(*arguments)
    store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with _signals_and_logs_restored(), tempfile.TemporaryDirectory(prefix="crosscut-ranks-") as folder:
        others = set(multiprocessing.active_children())
        try:
            context = start_processes(
                name="crosscut",
                entrypoint=_run_rank,
                args=dict.fromkeys(range(num_ranks), (function, arguments)),
                envs={rank: _environment(rank, num_ranks, store.port) for rank in range(num_ranks)},
                logs_specs=DefaultLogsSpecs(log_dir=folder),
                start_method="spawn",
            )
            requests = _PassedOn(list(context.pids().values()), signals)
            result = context.wait(period=_POLL)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stopped.sigval) from None
        finally:
            for rank in set(multiprocessing.active_children()) - others:  # also where starting them was cut short
                rank.kill()
                rank.join(5)
    assert result is not None
    if result.is_failed():
        (failure,) = result.failures.values()  # the first that was seen; the rest were stopped for it
        if requests.first and -failure.exitcode in signals:  # it was not where it could take a request
            raise SystemExit(128 + requests.first)
        _raise(failure, num_ranks)
    value: _T = result.return_values[0]
    return value


class _PassedOn:
    """Passes the first request to stop on to the ranks; put in place of PyTorch's handlers, which would end them."""

    def __init__(self, ranks: list[int], signals: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.first = 0
        """The signal that asked first, 0 until then."""
        self._when = 0.0
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._take)

    def _take(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.first and number != signal.SIGUSR1 and now - self._when > SAME_REQUEST:
            raise SignalException("stopped at once", sigval=signal.Signals(number))
        if not self.first:
            self.first, self._when = number, now
        for pid in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)


@contextmanager
def _signals_and_logs_restored() -> Iterator[None]:
    """Keep PyTorch's launcher from logging what `launch` tells, and put its signal handlers away afterwards."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1) if in_main_thread else ()
    handlers = {number: signal.getsignal(number) for number in caught}
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _run_rank(function: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
    """Run `function` in a rank's process and record its error.

    A rank that merely lost its connection waits, so that the launcher sees the rank at fault first and stops this one.
    """
    leave_with_parent()
    share_cores()
    try:
        return function(*arguments)
    except Exception as error:
        if is_lost_connection(error):
            time.sleep(_WAIT_FOR_CAUSE)
        get_error_handler().record_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the threads of a broken connection can crash an interpreter that is taken down in order


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
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", loopback)
    return {name: str(value) for name, value in environment.items()}


def _raise(failure: ProcessFailure, num_ranks: int) -> NoReturn:
    """Raise for a failed rank what the user is to see."""
    told = failure.error_file_data.get("message", {})
    if not isinstance(told, dict):
        told = {}  # the rank had no time to tell anything
    kind, _, text = str(told.get("message", "")).partition(": ")
    user_error = getattr(errors, kind, None)
    if isinstance(user_error, type) and issubclass(user_error, CrosscutError):
        raise user_error(text)
    place = f"rank {failure.local_rank} of {num_ranks}"
    if told:
        stack = str(told["extraInfo"]["py_callstack"]).rstrip()
        raise RankFailure(f"{stack}\n{place} failed as above; the other ranks were stopped.")
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " This is often the system running out of memory." if name == "SIGKILL" else ""
        raise RankFailure(f"{place} was ended by {name}; the other ranks were stopped.{hint}")
    raise RankFailure(f"{place} exited with code {failure.exitcode}; the other ranks were stopped.")


def is_lost_connection(error: Exception) -> bool:
    """Whether a rank failed only because another one did, by what gloo, nccl and the store say then."""
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Connection refused",
        "remote process exited",
    )
    return isinstance(error, dist.DistNetworkError) or any(sign in str(error) for sign in signs)


@contextmanager
def joined_rank() -> Iterator[None]:
    """Around the work of a rank that torchrun started: show the traceback of the rank at fault, and only that.

    A rank that merely lost its connection to another waits a little, so that the cause is printed first and torchrun
    can stop it, and then leaves with one line.
    """
    share_cores()
    try:
        yield
    except CrosscutError:
        raise
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        if is_lost_connection(error):
            time.sleep(_WAIT_FOR_CAUSE)
            print(f"crosscut: rank {rank} stopped, since another rank did.", file=sys.stderr)  # noqa: T201
        else:
            traceback.print_exc()
            print(f"crosscut: rank {rank} failed as above.", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(1)
