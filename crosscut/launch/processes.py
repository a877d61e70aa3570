"""Functions that start the processes of a run, or join processes that torchrun started.

A rank reads its position from the environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
If a launcher that sets these variables, such as torchrun, has started the ranks, a command joins these ranks. Without a
launcher, `launch` starts all ranks on this machine and sets the same variables. If a rank fails, the other ranks are
stopped, and the user sees only the traceback of the rank that failed first.
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
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from crosscut.config import ConfigError, CrosscutError, LayoutError, RankFailure, RunHung, errors
from crosscut.config.system.machine import available_cores, leave_with_parent
from crosscut.config.system.terminal import echo
from crosscut.launch.causes import told_by_cause
from crosscut.launch.hangs import EXIT_HUNG, EXIT_RESTART
from crosscut.launch.heap import give_freed_tensors_back, use_huge_pages
from crosscut.launch.restarts import store_of_restart
from crosscut.launch.room import require_files, require_ports, shared_memory_told
from crosscut.launch.server import start_ranks
from crosscut.launch.stopping import REQUESTS, is_repeated

_T = TypeVar("_T")

_LOOPBACK = "127.0.0.1"

_WAIT_FOR_CAUSE = 5.0
"""Number of seconds that a rank waits after it has lost a connection. Meanwhile, the rank that failed first can report
its error, which is the cause.
"""

_POLL = 0.1
"""Number of seconds between two checks of the ranks."""


def was_started() -> bool:
    """Whether torchrun or a similar launcher started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_world_size() -> int:
    """Number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if was_started() else 1


def ranks_on_this_machine(world_size: int) -> int:
    """Number of ranks on this machine: `world_size` without torchrun, or `LOCAL_WORLD_SIZE` (1 if unset) under
    torchrun.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if was_started() else world_size


def is_first_started() -> bool:
    """Whether this process is the first rank (rank 0). Also true without a launcher."""
    return not was_started() or int(os.environ["RANK"]) == 0


def choose_device(name: str) -> torch.device:
    """Return the device of this rank for the setting `name`: `cpu`, `cuda`, or `auto`, which means cuda if there is a
    GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def has_too_few_gpus(num_ranks: int) -> bool:
    """Whether this machine has GPUs, but fewer than `num_ranks`. Always false for ranks that torchrun started."""
    return not was_started() and 0 < torch.cuda.device_count() < num_ranks


def require_devices(name: str, num_ranks: int, axes: str) -> None:
    """Check that this machine has a device for each of `num_ranks` ranks. `name` is `cpu`, `cuda` or `auto`. `axes` is
    the name that error messages use for the number of ranks (`Layout.names_of_axes`).

    Raises `ConfigError` if `name` is cuda and this machine has no GPU, and `LayoutError` if the ranks use GPUs but this
    machine has fewer than `num_ranks` GPUs.
    """
    num_devices = torch.cuda.device_count()
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "This machine has no GPU, so the device must be cpu, but is cuda. Set the device to cpu "
            "(`training.device` in a run's file, `--device` in other commands)."
        )
    if choose_device(name).type == "cuda" and num_ranks > num_devices:
        raise LayoutError(
            f"{axes} must be at most {num_devices}, this machine's number of GPUs, but is {num_ranks}. Choose "
            "a smaller layout, use several machines with torchrun, or set the device to cpu (`training.device` in a "
            "run's file, `--device` in other commands)."
        )


@contextmanager
def process_group(device: torch.device, num_ranks: int | None = None) -> Iterator[None]:
    """Context in which the ranks can communicate through PyTorch's default process group.

    The group contains the first `num_ranks` of the ranks that a launcher started (by default all ranks). Without a
    launcher, the group contains only this process.

    On the CPU, the group uses gloo, and every rank uses as many threads as the rank with the fewest threads. On CUDA,
    the group uses nccl for device tensors and gloo for host tensors, and `device` becomes the current device.

    On exit, the group is destroyed. After an error, a group of several ranks is not destroyed, because destroying the
    group could wait for a failed rank. The process must end after such an error.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cpu":
        use_huge_pages()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A message should start before the product with which it overlaps.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    if was_started():
        size, rank = num_ranks or started_world_size(), int(os.environ["RANK"])
        dist.init_process_group(backend, store=store_of_restart(), world_size=size, rank=rank)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cpu":
        _take_as_many_threads()
        give_freed_tensors_back()
    try:
        yield
    except BaseException:
        # Destroying the group may wait for other ranks. A failed rank must not wait, so that its error is shown.
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def keep_process_group(device: torch.device) -> None:
    """Create the same process group as `process_group`, but keep it until this process ends. Does nothing if a process
    group exists.

    Use this function in a program that Crosscut does not control. If an uncaught error ends the program, the group is
    not destroyed.
    """
    if dist.is_initialized():
        return
    group = process_group(device)
    group.__enter__()
    atexit.register(lambda: hasattr(sys, "last_value") or group.__exit__(None, None, None))


def share_cores() -> None:
    """Set PyTorch's number of threads to this rank's share of the machine's cores, at least one.

    The share is the number of usable cores divided by `LOCAL_WORLD_SIZE` (1 if unset). The share overrides
    `OMP_NUM_THREADS`, which torchrun sets to 1. If each rank is already bound to its own cores, start the ranks with
    `LOCAL_WORLD_SIZE` unset.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, available_cores() // ranks))


def _take_as_many_threads() -> None:
    """Make PyTorch on every rank use as many threads as on the rank with the fewest threads.

    The last bits of a kernel's sums depend on the number of threads. Without this function, replicas on machines with
    different numbers of cores would diverge.
    """
    threads = torch.tensor([torch.get_num_threads()])
    dist.all_reduce(threads, dist.ReduceOp.MIN)
    torch.set_num_threads(int(threads))


def launch(
    function: Callable[..., _T], arguments: tuple[object, ...], *, num_ranks: int, signals: tuple[int, ...] = REQUESTS
) -> _T:
    """Run `function(*arguments)` in `num_ranks` processes on this machine and return the first rank's result.

    With one rank, the function runs in this process. `function` must be importable by name, and its result must be
    picklable. If a rank fails, the other ranks are stopped, and the error of the rank that failed first is raised. A
    `CrosscutError` is raised unchanged, and any other error as a `RankFailure` that contains the rank's traceback, if
    there is one.

    Signals that this process receives while it waits for the ranks:

    - The first signal of `signals` (by default SIGTERM and SIGUSR1) is passed on to the ranks as a request to stop (see
      `stopping`). If a rank does not yet handle these requests, all ranks are stopped at once.
    - A SIGTERM more than `SAME_REQUEST` seconds after the first request stops all ranks at once.
    - SIGINT (Ctrl-C) stops all ranks at once. If `signals` contains SIGINT, the first SIGINT is passed on instead, and
      only a later SIGINT stops all ranks at once.
    - If this process is killed, the ranks end, too.

    If SIGINT stops the ranks at once, `KeyboardInterrupt` is raised. If another signal stops the ranks at once,
    `SystemExit` is raised with 128 + the number of the signal.
    """
    if num_ranks == 1:
        return function(*arguments)
    result, requests = _run_ranks(function, arguments, num_ranks, signals)
    if result.is_failed():
        (failure,) = result.failures.values()  # the first failure, because of which the other ranks were stopped
        if requests.first and -failure.exitcode in signals:  # the rank was not yet handling requests
            raise SystemExit(128 + requests.first)
        _raise(failure, num_ranks)
    value: _T = result.return_values[0]
    return value


def _run_ranks(
    function: Callable[..., object], arguments: tuple[object, ...], num_ranks: int, signals: tuple[int, ...]
) -> tuple[RunProcsResult, "_PassedOn"]:
    """Start the ranks and wait until all of them have ended. No rank is left running, even if an error or a signal ends
    the wait.
    """
    require_files(num_ranks)
    require_ports(_LOOPBACK, num_ranks)
    store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with _signals_and_logs_restored(), tempfile.TemporaryDirectory(prefix="crosscut-ranks-") as folder:
        others = set(multiprocessing.active_children())
        try:
            environments = {rank: _environment(rank, num_ranks, store.port) for rank in range(num_ranks)}
            with shared_memory_told():
                context = start_ranks(_run_rank, (function, arguments), environments, folder)
            requests = _PassedOn(list(context.pids().values()), signals)
            result = context.wait(period=_POLL)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stopped.sigval) from None
        finally:
            for rank in set(multiprocessing.active_children()) - others:  # also runs if the start was interrupted
                rank.kill()
                rank.join(5)
    assert result is not None
    return result, requests


class _PassedOn:
    """Signal handler that passes requests to stop on to the ranks. PyTorch's own handlers would end the ranks
    immediately.
    """

    def __init__(self, ranks: list[int], signals: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.first = 0
        """Number of the first signal that arrived, or 0 if none has arrived."""
        self._when = 0.0
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._take)

    def _take(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.first and is_repeated(number, now - self._when):
            raise SignalException("stopped at once", sigval=signal.Signals(number))
        if not self.first:
            self.first, self._when = number, now
        for pid in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1)


@contextmanager
def _signals_and_logs_restored() -> Iterator[None]:
    """Context that silences the log of PyTorch's launcher, and restores the log levels and the signal handlers on exit.
    `launch` reports failures itself.
    """
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


def _run_rank(function: Callable[..., _T], arguments: tuple[object, ...]) -> _T:
    """Run `function` in a rank's process and record its error.

    If the error is only a lost connection, this rank waits. Meanwhile, the launcher finds the rank that failed first,
    and then stops this rank.
    """
    leave_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback; the launching process reports the interrupt
    share_cores()
    try:
        return function(*arguments)
    except Exception as error:
        if is_lost_connection(error):
            time.sleep(_WAIT_FOR_CAUSE)
        leave_with_error(error)


def leave_with_error(error: BaseException) -> NoReturn:
    """End this rank at once. The process that launched it tells the error."""
    get_error_handler().record_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # with a broken connection, threads can crash the interpreter during an orderly exit


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the launching process hosts the store
    }
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", loopback)
    return {name: str(value) for name, value in environment.items()}


def _raise(failure: ProcessFailure, num_ranks: int) -> NoReturn:
    """Raise the error of a failed rank in the form that the user should see."""
    told = failure.error_file_data.get("message", {})
    if not isinstance(told, dict):
        told = {}  # the rank ended before it could record an error
    kind, _, text = str(told.get("message", "")).partition(": ")
    user_error = getattr(errors, kind, None)
    if isinstance(user_error, type) and issubclass(user_error, CrosscutError):
        raise user_error(text)
    if failure.exitcode in (EXIT_HUNG, EXIT_RESTART):
        raise RunHung(may_restart=failure.exitcode == EXIT_RESTART)
    place = f"rank {failure.local_rank} of {num_ranks}"
    if told:
        stack = str(told["extraInfo"]["py_callstack"]).rstrip()
        if message := told_by_cause(place, kind, text, stack):
            raise RankFailure(message)
        raise RankFailure(f"{stack}\n{place} failed (traceback above); the other ranks were stopped.")
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " The system probably ran out of memory. Try a smaller batch or model." if name == "SIGKILL" else ""
        raise RankFailure(f"{place} was ended by {name}; the other ranks were stopped.{hint}")
    raise RankFailure(
        f"{place} exited with code {failure.exitcode} and recorded no error; the other ranks were stopped. Look for "
        "the cause in the output above."
    )


def is_lost_connection(error: Exception) -> bool:
    """Whether `error` means that this rank lost the connection to another rank. The other rank has then probably failed
    first.

    The decision depends on the error messages of gloo, nccl and PyTorch's TCP store.
    """
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
    """Context for the work of a rank that torchrun started. If ranks fail, only the first failed rank shows a
    traceback.

    A `CrosscutError` propagates unchanged. After any other error, this rank prints the traceback and exits with status
    1. If the error is a lost connection to another rank, this rank first waits a few seconds. Meanwhile, the other rank
    prints its traceback, and torchrun usually stops this rank. If torchrun does not, this rank prints one line instead
    of the traceback and exits with status 1.
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
            echo(f"crosscut: rank {rank} stopped because another rank failed.", err=True)
        else:
            echo(traceback.format_exc(), err=True, nl=False)
            echo(f"crosscut: rank {rank} failed (traceback above).", err=True)
        sys.exit(1)
