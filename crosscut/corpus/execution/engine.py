"""Engines run tasks: in processes on this machine, or on an existing Ray cluster. Every engine calls `execute`.

A task reads and writes files, so an engine only has to call the task in some process and return its record. All
machines of a Ray cluster must see the corpus's folder under the same path. If a record exceeds its budget and ends the
process of the task, the process is replaced and the task starts again without the record (see `budget`).
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import resource
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple, Protocol, Self

from crosscut.config.corpora import EngineConfig
from crosscut.config.errors import CrosscutError, DataError
from crosscut.config.system.extras import install_command
from crosscut.config.system.files import open_own, require_regular
from crosscut.config.system.machine import available_cores, leave_with_parent, require_room
from crosscut.corpus.execution.budget import NOTE_BYTES, Note, add_loss, clear_note, find_loss
from crosscut.corpus.execution.stages import StageTask, TaskRecord, execute, writing_to

WORKERS_LOCK = ".workers.lock"
"""Lock file in the work folder. Every worker process holds a shared lock on this file until the process ends."""

AHEAD = 2
"""Number of tasks that are submitted to Ray for each core, so that no core waits for its next task."""


class TaskCall(NamedTuple):
    """Arguments of `execute`: the folder for the result, a task, and the task's key."""

    folder: Path
    task: StageTask
    key: str


class Engine(Protocol):
    """Engine that runs the tasks of a stage."""

    def run(self, calls: Sequence[TaskCall]) -> Iterator[TaskRecord]:
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
    else:
        with _Processes(workers, lock) as processes:
            yield processes


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


class _Processes:
    """Worker processes on this machine, started when they are needed. With one worker, only tasks that limit their
    records run in a process of their own.
    """

    def __init__(self, workers: int, lock: Path) -> None:
        self._workers = workers
        self._lock = lock
        self._idle: list[TaskWorker] = []
        self._all: list[TaskWorker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._all:
            worker.leave(at_once=kind is not None)  # the next run repeats unfinished tasks
        for worker in self._all:
            worker.join()

    def run(self, calls: Sequence[TaskCall]) -> Iterator[TaskRecord]:
        waiting = deque(calls)
        busy: list[TaskWorker] = []
        while waiting or busy:
            if waiting and self._workers == 1 and not waiting[0].task.is_watched:
                yield execute(*waiting.popleft())
                continue
            while waiting and len(busy) < self._workers:
                if not self._idle:
                    self._idle.append(TaskWorker(self._lock))
                    self._all += self._idle
                busy.append(self._idle.pop())
                busy[-1].start(waiting.popleft())
            ready = wait([worker.connection for worker in busy])
            for worker in [worker for worker in busy if worker.connection in ready]:
                if record := worker.finish(self._workers):
                    busy.remove(worker)
                    self._idle.append(worker)
                    yield record


class DeadWorkerError(DataError):
    """Error for a worker process that has ended, but not because of a record."""


class TaskWorker:
    """A process that runs one task at a time, and is replaced if a record ends it."""

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock
        self._call: TaskCall | None = None
        # Spawn, because a fork would copy locks that threads of libraries may hold.
        self._context = multiprocessing.get_context("spawn")
        self._note = self._context.RawArray("B", NOTE_BYTES)
        self._begin()

    def _begin(self) -> None:
        clear_note(self._note)
        self.connection, other = self._context.Pipe()
        self._process = self._context.Process(target=_work, args=(other, self._note, self._lock), daemon=True)
        self._process.start()
        other.close()

    def start(self, call: TaskCall) -> None:
        """Start a task. `connection` is ready when the task is done or the process has ended."""
        self._call = call
        with suppress(ConnectionError):  # if the process has ended, `finish` finds out
            self.connection.send(call)

    def finish(self, num_workers: int) -> TaskRecord | None:
        """Return the record of the task that is done, or raise its exception. If a record of the task has ended the
        process, start the task again and return None. `num_workers` is the number of processes, for the message.
        """
        assert self._call is not None
        answer: TaskRecord | BaseException | None
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            answer = None
        if isinstance(answer, TaskRecord):
            return answer
        if answer is not None and not isinstance(answer, MemoryError):
            raise answer
        if answer is None:
            self._process.join()
        loss = find_loss(self._note, self._process.exitcode, out_of_memory=answer is not None)
        self.leave(at_once=True)
        self.join()
        if loss is None:
            is_one = num_workers == 1
            name = "The worker process" if is_one else f"One of the {num_workers} worker processes"
            remedy = "Free some memory" if is_one else "Free some memory or set a lower `engine.workers`"
            raise DeadWorkerError(
                f"{name} died, perhaps because memory ran out. Finished tasks are kept. {remedy}, then start again."
            )
        with writing_to(self._call.folder):
            add_loss(self._call.folder, self._call.task.name, self._call.key, loss)
        self._begin()
        self.start(self._call)
        return None

    def leave(self, *, at_once: bool) -> None:
        """Tell the process to end: at once, or as soon as it waits for a task."""
        if at_once:
            self._process.terminate()
        self.connection.close()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._process.join()


_held: list[IO[str]] = []  # keeps the lock file open until the process ends


def _work(connection: Connection, note: Note, lock: Path | None) -> None:
    """Run tasks in a worker process until the other end of the connection closes."""
    if lock:
        file = _opened(lock)
        fcntl.flock(file, fcntl.LOCK_SH)
        _held.append(file)
    for number in (signal.SIGINT, signal.SIGUSR1):  # the parent process handles these signals and stops the workers
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    leave_with_parent()
    with suppress(EOFError, ConnectionError):
        while True:
            call: TaskCall = connection.recv()
            clear_note(note)
            connection.send(_answer(call, note))


def _answer(call: TaskCall, note: Note) -> TaskRecord | BaseException:
    try:
        return execute(*call, note)
    except BaseException as error:
        if not isinstance(error, CrosscutError):
            error.add_note("".join(traceback.format_exception(error)))  # a pickled exception loses its traceback
        return error


@contextmanager
def _ray(config: EngineConfig) -> Iterator[Engine]:
    try:
        import ray
    except ImportError:
        raise DataError(
            f'`engine.kind` "ray" needs Ray, but Ray is not installed. Run `{install_command("ray")}`.'
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


@cache
def _own_worker() -> TaskWorker:
    return TaskWorker(None)


def _supervise(call: TaskCall) -> TaskRecord:
    """Run a task in a child of this process, which is a worker of Ray. If the child dies, this process ends, too. Ray
    then runs the task elsewhere.
    """
    worker = _own_worker()
    worker.start(call)
    try:
        while not (record := worker.finish(1)):
            pass
    except DeadWorkerError:
        os._exit(1)
    return record


class _Cluster:
    def __init__(self, ray: ModuleType, at_once: int) -> None:
        self._ray = ray
        self._at_once = at_once
        self._execute: Any = ray.remote(_supervise)

    def run(self, calls: Sequence[TaskCall]) -> Iterator[TaskRecord]:
        waiting = deque(calls)
        under_way: list[object] = []
        while waiting or under_way:
            while waiting and len(under_way) < self._at_once:
                under_way.append(self._execute.remote(waiting.popleft()))
            done, under_way = self._ray.wait(under_way)
            for reference in done:
                yield self._fetch(reference)

    def _fetch(self, reference: object) -> TaskRecord:
        errors = self._ray.exceptions
        try:
            record: TaskRecord = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise DataError(
                f"A process of the Ray cluster died during a task: {error}. Finished tasks are kept. Check the "
                "cluster, then start again."
            ) from None
        return record
