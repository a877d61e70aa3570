"""Stages and their tasks: what makes a killed run resume where it stopped and a changed setting redo only what it must.

A stage is a list of tasks. A task is a function of files that lie on the disk and of settings; it writes files of its
own and nothing else. Its key is a hash of the stage's name and version, the settings, and the contents of its inputs.
When it is done, its files are renamed into place and then its record, with the key and their hashes, is written. A task
whose record has the same key is not run again. So neither the number of workers, nor the order in which they finish,
nor where a run was killed can show in the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from crosscut.config.errors import DataError
from crosscut.config.files import write_whole
from crosscut.data.hashing import sha256

Counts = dict[str, Any]
"""What a task tells of its work, as JSON has it; `add_counts` adds those of a stage's tasks."""


class Output:
    """Where a task writes: files that get their names when the task is done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        """Where to write the file that will be called `name` in the stage's folder."""
        return self._folder / name


@dataclass(frozen=True, kw_only=True)
class Task:
    """A piece of a stage's work."""

    name: str
    """Another for each task of the stage; tasks are reported in the order of their names."""

    function: Callable[[Output], Counts]
    """Does it. Pickles: a function of a module, with `functools.partial` around it."""

    inputs: tuple[Path, ...] = ()
    """Files of earlier stages whose contents the result depends on."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else the result depends on, as JSON has it."""

    size: int = 0
    """Bytes of text that it works on, for progress."""


class Stage(Protocol):
    """One step of the pipeline."""

    @property
    def name(self) -> str:
        """Its folder's name."""
        ...

    @property
    def version(self) -> int:
        """Goes up when the stage's code gives other results."""
        ...

    def tasks(self, work: Path) -> Sequence[Task]:
        """What there is to do, once the stages before are done; the same list every time."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage whose tasks follow from what the stages before it wrote."""

    name: str
    version: int
    plan: Callable[[Path], Sequence[Task]]
    """Gives the tasks of a work folder."""

    def tasks(self, work: Path) -> Sequence[Task]:
        """What `plan` says."""
        return self.plan(work)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a task that is done."""

    task: str
    key: str
    seconds: float
    """Time of the process that did it."""

    size: int
    files: dict[str, str]
    """Name to SHA-256 of the files it wrote."""

    sizes: dict[str, int]
    """Name to bytes of the same."""

    counts: Counts

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record at `path`; None where there is none, or none that can be read."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def read_records(work: Path, stage: str) -> list[Record]:
    """Records of all tasks of a stage that are done, by name."""
    records = (Record.read(path) for path in sorted((work / stage).glob("*.json")))
    return [record for record in records if record is not None]


class Digests:
    """The hashes of files that stages have written, from their records."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def learn(self, folder: Path, record: Record) -> None:
        """Take up the files of a task."""
        self._known.update({folder / name: digest for name, digest in record.files.items()})

    def key(self, stage: Stage, task: Task) -> str:
        """What the result of a task depends on, as one hash."""
        content = {
            "stage": stage.name,
            "version": stage.version,
            "task": task.name,
            "settings": dict(task.settings),
            "inputs": [[path.name, self._known[path]] for path in task.inputs],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_done(folder: Path, task: Task, key: str) -> Record | None:
    """The record of a task whose result is there already; None where it must be run."""
    record = Record.read(folder / f"{task.name}.json")
    if record is None or record.key != key:
        return None
    return record if all(_has_size(folder / name, size) for name, size in record.sizes.items()) else None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def execute(folder: Path, task: Task, key: str) -> Record:
    """Run a task, put its files into `folder`, and write its record last.

    Raises what the task raises, and `DataError` where the disk does not take what it writes; then nothing of it is
    left.
    """
    temporary = folder / f".{task.name}.{socket.gethostname()}.{os.getpid()}.unfinished"
    started = time.monotonic()
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        counts = task.function(Output(temporary))
        written = sorted(temporary.iterdir())
        files = {path.name: sha256(path) for path in written}
        sizes = {path.name: path.stat().st_size for path in written}
        record_path = folder / f"{task.name}.json"
        assert record_path.name not in files, f"{record_path.name} is the task's record"
        record_path.unlink(missing_ok=True)  # from here to the end the task counts as not done
        for path in written:
            _flush(path)
            path.replace(folder / path.name)
        seconds = time.monotonic() - started
        record = Record(
            task=task.name, key=key, seconds=seconds, size=task.size, files=files, sizes=sizes, counts=counts
        )
        write_whole(record_path, json.dumps(asdict(record)))
        return record
    except OSError as error:
        raise DataError(
            f"`{folder}` must take what the stage writes, but does not: {error.strerror or error}. Free some space or "
            f"choose another `folder`, and start again: finished parts are kept."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_others(folder: Path, tasks: Sequence[Task]) -> None:
    """Remove the files of tasks that the stage no longer has, and what killed tasks left behind."""
    names = {task.name for task in tasks}
    kept: set[str] = set()
    for record in _records_in(folder):
        if record.task in names:
            kept |= {*record.files, f"{record.task}.json"}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _records_in(folder: Path) -> Iterator[Record]:
    for path in folder.glob("*.json"):
        record = Record.read(path)
        if record is not None:
            yield record


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def add_counts(counts: Sequence[Counts]) -> Counts:
    """The counts of several tasks as one: numbers are added, tables by their keys, and lists laid end to end."""
    total: Counts = {}
    for one in counts:
        _add(total, one)
    return total


def _add(total: Counts, one: Mapping[str, Any]) -> None:
    for name, value in one.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(name, {}), value)
        elif isinstance(value, list):
            total.setdefault(name, []).extend(value)
        else:
            total[name] = total[name] + value if name in total else value
