"""Pool of ranks: processes that are started once per test session and run one job after another.

Starting four processes that import torch takes seconds. A job on ranks that are already running takes milliseconds.
`run` sends a module-level function to the first ranks of the pool, and every rank calls the function. The process group
of these ranks is created for the job and destroyed after the job.

    def job(number: int) -> int:
        return number + torch.distributed.get_rank()

    def test_ranks_count(ranks: RankPool) -> None:
        assert ranks.run(2, job, 5) == [5, 6]

This file is also the program that a rank runs. A rank and the pool communicate through a pipe. If one of them dies, the
other sees that the pipe is closed. The ranks are forks of a server that has imported torch (`nursery`).
"""

import atexit
import faulthandler
import functools
import importlib
import multiprocessing.process
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parent
GRACE = 10.0
"""Seconds within which the other ranks must end after one rank has failed."""
STARTING = 120.0
"""Seconds within which a rank must have imported torch, on a busy machine."""
READY = b"ready"
_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LOST = ("by peer", "Broken pipe", "Connection refused", "Timed out waiting")
"""Parts of the messages of errors that a rank raises because another rank failed or did not arrive."""


class RankError(Exception):
    """A rank died, did not end in time, or raised an exception that cannot be pickled. As the cause of another error:
    the traceback on the rank.
    """


@dataclass
class _Rank:
    """One process of the pool, with the pool's end of the pipe and the file of the process's output."""

    process: BaseProcess
    connection: Connection
    printed: IO[bytes]


@dataclass
class _Failure:
    """Report of a rank that has no result."""

    error: BaseException
    lost_connection: bool = False
    """Whether the rank failed only because another rank failed."""


@dataclass
class RankPool:
    """Ranks that run one job after another. The ranks start with the first job. After a job that left a rank dead or
    hanging, the next job starts new ranks.
    """

    size: int = 4
    _ranks: list[_Rank] = field(default_factory=list)
    _store: Any = None
    _num_jobs: int = 0

    def run(self, num_ranks: int, function: Callable[..., Any], *arguments: Any, time_limit: float = 60.0) -> list[Any]:
        """Results of `function(*arguments)` on the first `num_ranks` ranks, in the order of the ranks.

        Arguments and results are pickled. The function must be an attribute of its module, because the ranks import it
        by name. Raises the exception that a rank raised, with the rank's traceback as the cause. If several ranks
        raised, an exception that is not a lost connection comes first.
        """
        assert num_ranks <= self.size, f"the pool has {self.size} ranks, but {num_ranks} are asked for"
        if not self._ranks:
            self._start()
        self._num_jobs += 1
        job = pickle.dumps((_module_name(function), function.__qualname__, pickle.dumps(arguments)))
        ranks = self._ranks[:num_ranks]
        for i, rank in enumerate(ranks):
            order = (self._num_jobs, i, num_ranks, time_limit, _filters())
            rank.connection.send((order, job))
        outcomes = self._collect(ranks, time_limit)
        failures = sorted((o for o in outcomes if isinstance(o, _Failure)), key=lambda failure: failure.lost_connection)
        if failures:
            raise failures[0].error
        return outcomes

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.connection.close()  # a rank ends when its connection is closed
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.exitcode is None:
                rank.process.kill()
                rank.process.join()
            rank.printed.close()
        self._ranks, self._store = [], None

    def _start(self) -> None:
        import torch.distributed as dist

        from crosscut.launch.server import PassedStream
        from tests.nursery import forked

        atexit.register(self.close)  # before `multiprocessing` waits for all processes
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forked()
        environment = {**os.environ, **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rank
            with PassedStream(printed.fileno()) as output:
                told = {"START": (theirs, self._store.port, environment, output)}
                process = context.Process(target=runpy.run_path, args=(__file__, told, "__main__"))
                process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, printed))
        for i, rank in enumerate(self._ranks):
            if not rank.connection.poll(STARTING) or rank.connection.recv_bytes() != READY:
                printed = _read(rank.printed)
                self.close()  # otherwise, later jobs would get the answers of earlier jobs
                raise RankError(f"rank {i} did not start\n{printed}")

    def _collect(self, ranks: list[_Rank], time_limit: float) -> list[Any]:
        outcomes: list[Any] = [None] * len(ranks)
        pending = {rank.connection: i for i, rank in enumerate(ranks)}
        deadline = time.monotonic() + time_limit + GRACE  # the process group itself gives up after `time_limit`
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                i = pending.pop(connection)
                outcomes[i] = self._outcome(ranks[i], i)
                if isinstance(outcomes[i], _Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                stacks = "\n".join(self._stacks(ranks[i], i) for i in pending.values())
                has_cause = any(isinstance(o, _Failure) and not o.lost_connection for o in outcomes)
                for i in pending.values():
                    text = f"ranks {sorted(pending.values())} did not end in time\n{stacks}"
                    outcomes[i] = _Failure(RankError(text), has_cause)
                break
        if pending or any(rank.process.exitcode is not None for rank in ranks):
            for rank in self._ranks:
                rank.process.kill()
            self.close()
        return outcomes

    def _outcome(self, rank: _Rank, i: int) -> Any:
        try:
            answer: bytes = rank.connection.recv_bytes()
        except (EOFError, OSError):
            rank.process.join()
            code = rank.process.exitcode
            assert code is not None
            ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            return _Failure(RankError(f"rank {i} ended {ended}\n{_read(rank.printed)}"))
        kind, *content = pickle.loads(answer)
        if kind == "result":
            return pickle.loads(content[0])
        pickled, text, lost_connection = content
        error: BaseException = RankError(text) if pickled is None else pickle.loads(pickled)
        error.__cause__ = RankError(f"on rank {i}:\n{text}")
        return _Failure(error, lost_connection)

    def _stacks(self, rank: _Rank, i: int) -> str:
        assert rank.process.pid is not None
        os.kill(rank.process.pid, signal.SIGUSR2)
        time.sleep(0.2)
        return f"rank {i}:\n{_read(rank.printed)}"


def _read(printed: IO[bytes]) -> str:
    printed.seek(0)
    return printed.read()[-10_000:].decode(errors="replace")


def _module_name(function: Callable[..., Any]) -> str:
    """Name by which a rank imports the function's module. For a module of the tests, this is its path here."""
    path = Path(function.__code__.co_filename).resolve()
    if path.is_relative_to(TESTS):
        return ".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts))
    return function.__module__


def _filters() -> list[tuple[Any, ...]]:
    """Current warning filters, as arguments of `warnings.filterwarnings`, so that a rank is as strict as its test."""

    def pattern(expression: Any) -> str:
        return "" if expression is None else getattr(expression, "pattern", expression)

    return [(action, pattern(m), kind, pattern(module), line) for action, m, kind, module, line in warnings.filters]


def _serve(connection: Connection, port: int) -> None:
    """Run one job after another on a rank, until the pool closes the connection."""
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.debug  # takes seconds, which would count against the time limit of a job

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    meshes = _meshes_made_from_now_on()
    _measure_matrix_rates_once()
    connection.send_bytes(READY)
    while True:
        try:
            order, job = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # the remains of a process group must not delay the end of the test session
        connection.send_bytes(_answer(order, job, store, meshes))


def _answer(order: tuple[Any, ...], job: bytes, store: Any, meshes: list[Any]) -> bytes:
    try:
        return pickle.dumps(("result", pickle.dumps(_run(order, job, store, meshes))))
    except BaseException as error:
        text = traceback.format_exc()
        lost_connection = any(sign in str(error) for sign in LOST)
        try:
            pickle.loads(pickled := pickle.dumps(error))
        except Exception:
            pickled = None
        return pickle.dumps(("error", pickled, text, lost_connection))


def _run(order: tuple[Any, ...], job: bytes, store: Any, meshes: list[Any]) -> Any:
    import torch
    import torch.distributed as dist

    number, rank, num_ranks, time_limit, filters = order
    module_name, qualified_name, arguments = pickle.loads(job)
    function: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        function = getattr(function, name)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # an earlier job may have changed the number on some ranks, and sums depend on it
    handlers = {caught: signal.getsignal(caught) for caught in _CAUGHT}
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for filter_ in reversed(filters):
            warnings.filterwarnings(*filter_)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"job {number}", store),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=time_limit),
        )
        try:
            # A rank that destroys the group too early would disconnect a rank that is still connecting, or that still
            # creates another group.
            dist.barrier()
            result = function(*pickle.loads(arguments))
            dist.barrier()
            return result
        finally:
            dist.destroy_process_group()
            _forget(meshes)
            for caught, handler in handlers.items():  # a run that was stopped ignores signals, as it is about to end
                signal.signal(caught, handler)


def _meshes_made_from_now_on() -> list[Any]:
    """Return a list to which every `DeviceMesh` is added when it is created."""
    from torch.distributed.device_mesh import DeviceMesh

    made: list[Any] = []
    make = DeviceMesh.__init__

    def make_and_note(mesh: Any, *arguments: Any, **options: Any) -> None:
        make(mesh, *arguments, **options)
        made.append(mesh)

    DeviceMesh.__init__ = make_and_note
    return made


def _measure_matrix_rates_once() -> None:
    """Measure the rate of this rank's matrix products once per precision. Otherwise, every run of a test would measure
    it for a tenth of a second, on all of its ranks.
    """
    from crosscut.training.watching import throughput

    throughput.measure_matrix_rate = functools.cache(throughput.measure_matrix_rate)


def _forget(meshes: list[Any]) -> None:
    """Release the process groups of a job, which ends their threads, and what PyTorch has cached for the job's meshes.

    The model and the trainer of a job refer to each other and to the mesh. Python collects such cycles seldom. Until
    then, the mesh would keep its groups.
    """
    for mesh in meshes:
        mesh._pg_registry.clear()
    meshes.clear()
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # torch 2.11 has no such cache
        _redistribute.clear_redistribute_planner_cache()


def _begin(connection: Connection, port: int, environment: dict[str, str], output: int) -> None:
    """Turn this fork of the server into a rank, with an environment and an output of its own."""
    multiprocessing.process._parent_process = None  # `launch` has not started this rank, so SIGTERM is a request
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    package = types.ModuleType("tests")  # the tests of this project, even if another package of this name is installed
    package.__path__ = [str(TESTS)]
    sys.modules["tests"] = package
    _serve(connection, port)


if __name__ == "__main__":
    _begin(*globals()["START"])
