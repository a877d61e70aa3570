"""Engines run tasks: in processes on this machine, or on an existing Ray cluster. Every engine calls `execute`.

A task reads and writes files, so an engine only has to call the task in some process and return its record. All
machines of a Ray cluster must see the corpus's folder under the same path.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from crosscut.config.corpora import EngineConfig
from crosscut.config.errors import DataError
from crosscut.config.system.files import open_own, require_regular
from crosscut.config.system.machine import available_cores, leave_with_parent, require_room
from crosscut.corpus.execution.stages import Record, Task, execute

WORKERS_LOCK = ".workers.lock"
"""Lock file in the work folder. Every worker process holds a shared lock on this file until the process ends."""

AHEAD = 2
"""Number of tasks that are submitted ahead for each worker, so that no worker waits for its next task."""


class Call(NamedTuple):
    """Arguments of `execute`: the folder for the result, a task, and the task's key."""

    folder: Path
    task: Task
    key: str


class Engine(Protocol):
    """Engine that runs the tasks of a stage."""

    def run(self, calls: Sequence[Call]) -> Iterator[Record]:
        """Run tasks and yield their records as the tasks finish, in any order. Exceptions of tasks reach the caller."""
        ...


def check_workers(config: EngineConfig) -> None:
    """Raise `ConfigError` if the workers run on this machine and it has too few cores or too little memory for them."""
    if "local" in (config.kind, config.address):
        require_room("`engine.workers`", config.workers, remedy="Remove `engine.workers` to use one worker per core.")


@contextmanager
def start_engine(config: EngineConfig, work: Path) -> Iterator[Engine]:
    """Start the engine that the config names, and stop the engine when the context ends. Tasks write to the folder
    `work`.

    If an earlier run was killed, this function first waits a second or two until the workers of that run have ended.
    Raises `DataError` if Ray is configured but not installed, if the Ray cluster does not answer, or if the lock of the
    workers is not a regular file.
    """
    workers = config.workers or available_cores()
    work.mkdir(parents=True, exist_ok=True)
    lock = work / WORKERS_LOCK
    with _opened(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    if config.kind == "ray":
        with _ray(config) as engine:
            yield engine
    elif workers == 1:
        yield _Here()
    else:
        # Spawn, because a fork would copy locks that threads of libraries may hold.
        context = multiprocessing.get_context("spawn")
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(lock,))
        try:
            yield _Processes(pool, workers)
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:  # the next run repeats their tasks
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _opened(lock: Path) -> IO[str]:
    """Open the lock file of the workers. Raises `DataError` if the path is not a regular file, because opening a pipe,
    for example, would wait forever.
    """
    try:
        if lock.is_symlink() or lock.exists():
            require_regular(lock)
    except OSError as error:
        raise DataError(
            f"`{lock}` must be a regular file, but is not: {error.strerror}. Remove this file, and start again."
        ) from None
    return open_own(lock, "a")


class _Here:
    def run(self, calls: Sequence[Call]) -> Iterator[Record]:
        for call in calls:
            yield execute(*call)


class _Processes:
    def __init__(self, pool: ProcessPoolExecutor, workers: int) -> None:
        self._pool = pool
        self._workers = workers

    def run(self, calls: Sequence[Call]) -> Iterator[Record]:
        waiting = deque(calls)
        under_way: dict[Future[Record], str] = {}
        try:
            while waiting or under_way:
                while waiting and len(under_way) < AHEAD * self._workers:
                    call = waiting.popleft()
                    under_way[self._pool.submit(execute, *call)] = call.task.name
                done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    del under_way[future]
                    yield future.result()
        except BrokenProcessPool:
            raise DataError(
                f"One of the {self._workers} worker processes died, perhaps because memory ran out. Finished tasks are "
                "kept. Free some memory or set a lower `engine.workers`, then start again."
            ) from None
        finally:
            for future in under_way:
                future.cancel()


_held: list[IO[str]] = []  # keeps the lock file open until the process ends


def _start_worker(lock: Path) -> None:
    file = _opened(lock)
    fcntl.flock(file, fcntl.LOCK_SH)
    _held.append(file)
    for number in (signal.SIGINT, signal.SIGUSR1):  # the parent process handles these signals and stops the workers
        signal.signal(number, signal.SIG_IGN)
    leave_with_parent()


@contextmanager
def _ray(config: EngineConfig) -> Iterator[Engine]:
    try:
        import ray
    except ImportError:
        raise DataError(
            "`engine.kind` \"ray\" needs Ray, but Ray is not installed. Run `pip install 'crosscut[ray]'`."
        ) from None
    try:
        ray.init(
            address=config.address,
            num_cpus=(config.workers or available_cores()) if config.address == "local" else None,
            include_dashboard=False if config.address == "local" else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DataError(
            f"`engine.address` must be the address of a running Ray cluster, but `{config.address}` does not answer: "
            f"{error}. Start the cluster, or set another `engine.address`."
        ) from None
    try:
        # Ray uses all cores for submitted tasks, so `engine.workers` limits how many tasks are submitted at a time.
        yield _Cluster(ray, config.workers or AHEAD * int(ray.cluster_resources().get("CPU", 1)))
    finally:
        ray.shutdown()


class _Cluster:
    def __init__(self, ray: Any, at_once: int) -> None:
        self._ray = ray
        self._at_once = at_once
        self._execute: Any = ray.remote(execute)

    def run(self, calls: Sequence[Call]) -> Iterator[Record]:
        waiting = deque(calls)
        under_way: list[Any] = []
        while waiting or under_way:
            while waiting and len(under_way) < self._at_once:
                under_way.append(self._execute.remote(*waiting.popleft()))
            done, under_way = self._ray.wait(under_way)
            for reference in done:
                yield self._fetch(reference)

    def _fetch(self, reference: Any) -> Record:
        errors = self._ray.exceptions
        try:
            record: Record = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise DataError(
                f"A process of the Ray cluster died during a task: {error}. Finished tasks are kept. Check the "
                "cluster, then start again."
            ) from None
        return record
