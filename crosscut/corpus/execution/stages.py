"""Stages, their tasks, and the records of finished tasks.

A killed run resumes where it stopped, and a changed setting repeats only the tasks that depend on the setting.

A stage is a list of tasks. A task depends only on files on the disk and on settings. The task writes its own files and
has no other effect. A task's key is a hash of the stage's name and version, the settings, and the contents of the input
files. When a task is done, its files are renamed into place. Then its record is written, with the key and the hashes of
the files. A task is not run again if its record has the current key. The result therefore does not depend on the number
of workers, on the order in which tasks finish, or on where a run was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Flag, auto
from pathlib import Path
from typing import Any

from crosscut.config.system.deletion import adopt, make_folder, remove_file, remove_folder, replace_file, why_kept
from crosscut.config.system.files import flush_to_disk, parse_json, read_small, write_whole
from crosscut.config.system.markers import MARKER_FILE, ForeignFolderError, marker_of
from crosscut.config.system.records import from_json
from crosscut.corpus.execution.budget import Note, RecordWatch, is_list_of_losses, losses_name, read_losses
from crosscut.data.folders import unwritable
from crosscut.data.hashing import sha256

_UNFINISHED = ".unfinished"
"""End of the name of a task's temporary folder."""

Counts = dict[str, Any]
"""Figures that a task reports about its work, as JSON values. `add_counts` adds up the counts of a stage's tasks."""


class Output:
    """Temporary folder for the files that a task writes. The files move to the stage's folder when the task is done."""

    def __init__(self, folder: Path, watch: RecordWatch | None = None) -> None:
        self._folder = folder
        self.watch = watch or RecordWatch()
        """Limits on the records that the task reads."""

    def path(self, name: str) -> Path:
        """Path in the temporary folder for the file that will have the name `name` in the stage's folder."""
        return self._folder / name


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """A unit of a stage's work, which one process runs as a whole."""

    name: str
    """Unique name within the stage. Tasks are reported in the order of their names."""

    function: Callable[[Output], Counts]
    """The function that does the work. The function must be picklable: a module's function, wrapped in
    `functools.partial`."""

    inputs: tuple[Path, ...] = ()
    """Files of earlier stages that the task reads. If the contents of a file change, the task runs again."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """All other values that the result depends on, as JSON values. If a value changes, the task runs again."""

    size: int = 0
    """Bytes of text that the task works on, for the progress bar."""

    is_watched: bool = False
    """Whether the task limits its records (`Output.watch`). It then runs in a process of its own, even if there is only
    one worker."""


class Yields(Flag):
    """Files that a stage yields for the stages after it."""

    FILES = 0
    """Nothing but files that later stages name."""

    DROPS = auto()
    """The rows of dropped documents, for each part."""

    TEXTS = auto()
    """New texts, for each part."""


@dataclass(frozen=True, kw_only=True)
class CorpusStage(ABC):
    """One step of the pipeline."""

    name: str
    """Name of the stage and of its folder."""

    version: int
    """Version of the stage's code. Increase it with every code change that alters the results."""

    yields: Yields = Yields.FILES
    """Files that the stage yields for later stages."""

    @abstractmethod
    def tasks(self, work: Path) -> Sequence[StageTask]:
        """List the stage's tasks. All earlier stages must be done. Every call returns the same list."""


@dataclass(frozen=True, kw_only=True)
class PlannedStage(CorpusStage):
    """A stage whose tasks depend on the files that earlier stages wrote."""

    plan: Callable[[Path], Sequence[StageTask]]
    """Function that takes the work folder and returns the tasks."""

    def tasks(self, work: Path) -> Sequence[StageTask]:
        """List the tasks, as returned by `plan`."""
        return self.plan(work)


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """Record of a finished task."""

    task: str
    key: str
    seconds: float
    """Seconds that the process spent on the task."""

    size: int
    """Bytes of text that the task worked on (`StageTask.size`)."""

    files: dict[str, str]
    """SHA-256 of each file that the task wrote, by the file's name."""

    sizes: dict[str, int]
    """Size in bytes of each file that the task wrote, by the file's name."""

    counts: Counts
    """Figures that the task reported."""

    @classmethod
    def read(cls, path: Path) -> TaskRecord | None:
        """Read the record at `path`. Return None if the file does not exist, cannot be read, or has changed since it
        was written, or if a name in it is a path: the files that a record names may be removed.
        """
        try:
            content = read_small(path)
            fields = parse_json(content)
            record = from_json(cls, fields)
            is_plain = all(Path(name).name == name for name in (record.task, *record.files))
            return record if is_plain and _sealed(fields) == content else None
        except (OSError, ValueError):
            return None

    def content(self) -> str:
        """Return the record as JSON. The last value is a hash of the other values, which reveals an edited record."""
        return _sealed(asdict(self))


def _sealed(fields: Mapping[str, object]) -> str:
    """Return fields as JSON with a hash at the end, which replaces any hash that they have."""
    plain = {name: value for name, value in fields.items() if name != "sha256"}
    return json.dumps({**plain, "sha256": hashlib.sha256(json.dumps(plain).encode()).hexdigest()})


def read_records(work: Path, stage: str) -> list[TaskRecord]:
    """Read the records of all finished tasks of a stage, ordered by the tasks' names."""
    return list(_records_in(work / stage))


class Digests:
    """Hashes of the files that stages have written, taken from the records."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def learn(self, folder: Path, record: TaskRecord) -> None:
        """Add the hashes of the files that one task wrote into `folder`."""
        self._known.update({folder / name: digest for name, digest in record.files.items()})

    def key(self, stage: CorpusStage, task: StageTask) -> str:
        """Compute the key of a task: a hash of everything on which the result depends. The hashes of all input files
        must be known.
        """
        content = {
            "stage": stage.name,
            "version": stage.version,
            "task": task.name,
            "settings": dict(task.settings),
            "inputs": [[path.name, self._known[path]] for path in task.inputs],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_done(folder: Path, task: StageTask, key: str) -> TaskRecord | None:
    """Return the record of a task whose result is up to date, or None if the task must be run.

    The sizes of all written files are compared with the record. The hash of a file is compared only if the file was
    modified after the record was written.
    """
    path = folder / f"{task.name}.json"
    record = TaskRecord.read(path)
    if record is None or record.key != key:
        return None
    try:
        written = path.stat().st_mtime_ns
        return record if all(_is_as_written(folder / name, record, written) for name in record.files) else None
    except OSError:
        return None


def _is_as_written(path: Path, record: TaskRecord, written: int) -> bool:
    now = path.stat()
    if now.st_size != record.sizes[path.name]:
        return False
    return now.st_mtime_ns <= written or sha256(path) == record.files[path.name]


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raise the `DataError` for a folder into which writing failed, in place of an error of the operating system."""
    try:
        yield
    except ForeignFolderError:
        raise
    except OSError as error:
        raise unwritable(folder, error, setting="folder", kept="Finished tasks are kept.") from None


def execute(folder: Path, task: StageTask, key: str, note: Note | None = None) -> TaskRecord:
    """Run a task, move its files into `folder`, and write its record last.

    If there is a `note`, shared memory for the record that the task reads, the records have limits (see `budget`).
    Raises `DataError` if the files cannot be written, and passes on all other exceptions of the task. After an
    exception, the task's unfinished files are removed.
    """
    owner = os.getpid() if note is None else os.getppid()  # the supervisor, so that a second attempt clears the first
    name = f".{task.name}.{socket.gethostname()}.{owner}{_UNFINISHED}"
    started = time.monotonic()
    try:
        with writing_to(folder):
            remove_folder(folder, name)
            temporary = make_folder(folder, name, durable=False)
            watch = RecordWatch(note, read_losses(folder, task.name, key)) if task.is_watched else RecordWatch()
            counts = task.function(Output(temporary, watch))
            watch.stop()
            written = sorted(path for path in temporary.iterdir() if path.name != MARKER_FILE)
            files = {path.name: sha256(path) for path in written}
            sizes = {path.name: path.stat().st_size for path in written}
            _replace(folder, task, written)
            seconds = time.monotonic() - started
            record = TaskRecord(
                task=task.name, key=key, seconds=seconds, size=task.size, files=files, sizes=sizes, counts=counts
            )
            write_whole(folder / f"{task.name}.json", record.content())
            return record
    finally:
        with suppress(OSError):
            remove_folder(folder, name)


def _replace(folder: Path, task: StageTask, written: Sequence[Path]) -> None:
    """Move the files of a task into its stage's folder, in place of the files and the record of an earlier run."""
    record_path = folder / f"{task.name}.json"
    names = {path.name for path in written}
    assert record_path.name not in names, f"{record_path.name} is the task's record"
    before = TaskRecord.read(record_path)
    remove_file(record_path)  # the task counts as not done until its new record is written
    for name in () if before is None else before.files.keys() - names:
        remove_file(folder / name)
    for path in written:
        flush_to_disk(path)
        replace_file(path, folder / path.name)


def remove_others(folder: Path, tasks: Sequence[StageTask]) -> list[str]:
    """Remove the files of tasks that the stage no longer has, and the unfinished files of killed tasks. The records of
    the tasks name the files. Files that no record names stay, because a user may have put them there.

    Returns a sentence for each unfinished folder that stays.
    """
    names = {task.name for task in tasks}
    kept = {losses_name(name) for name in names}
    dropped = {path.name for path in folder.glob(losses_name("*")) if is_list_of_losses(path)}
    for record in _records_in(folder):
        (kept if record.task in names else dropped).update((*record.files, f"{record.task}.json"))
    for name in dropped - kept:
        remove_file(folder / name)
    unfinished = (path.name for path in folder.glob(f".*{_UNFINISHED}"))
    return [left for name in unfinished if (left := remove_folder(folder, name))]


def remove_stage(work: Path, name: str) -> str:
    """Remove the folder of a stage that the corpus no longer has. Returns an empty text, or the sentence that says why
    the folder stays.
    """
    _adopt_copy(work, name)
    if left := why_kept(work, name):
        return left
    remove_others(work / name, ())
    return remove_folder(work, name, only=lambda _: False)


def begin_work(folder: Path, work: Path) -> None:
    """Make the folder `work` of a corpus in `folder`. A folder that was copied without its hidden files gets a marker.

    Raises `ForeignFolderError` for a folder that may hold files of the user.
    """
    if marker_of(work) is None and is_work(work):
        adopt(folder, work.name)
    make_folder(folder, work.name)


def is_work(work: Path) -> bool:
    """Whether a folder holds the folder of a stage."""
    return work.is_dir() and any(any(_records_in(path)) for path in work.iterdir() if path.is_dir())


def begin_folder(work: Path, name: str) -> Path:
    """Make the folder of a stage, and return its path. A folder without a marker, such as a copy without hidden files,
    gets one if the records of its tasks account for all of its files.

    Raises `ForeignFolderError` for a folder that may hold files of the user.
    """
    _adopt_copy(work, name)
    return make_folder(work, name)


def _adopt_copy(work: Path, name: str) -> None:
    """Give the folder of a stage without a marker one, if it holds records of tasks, and nothing but these records, the
    files that the records name, and unfinished folders.
    """
    folder = work / name
    if folder.is_symlink() or not folder.is_dir() or marker_of(folder) is not None:
        return
    names = {name for record in _records_in(folder) for name in (*record.files, f"{record.task}.json")}
    if names and {path.name for path in folder.iterdir() if not path.name.endswith(_UNFINISHED)} <= names:
        adopt(work, name)


def _records_in(folder: Path) -> Iterator[TaskRecord]:
    """Yield the records of all finished tasks in a stage's folder, ordered by the tasks' names."""
    return filter(None, (TaskRecord.read(path) for path in sorted(folder.glob("*.json"))))


def add_counts(counts: Sequence[Counts]) -> Counts:
    """Combine the counts of several tasks: add numbers, merge tables by key, and concatenate lists."""
    total: Counts = {}
    for one in counts:
        _add(total, one)
    return total


def _add(total: Counts, one: Counts) -> None:
    for name, value in one.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        elif isinstance(value, list):
            total.setdefault(name, []).extend(value)
        else:
            total[name] = total[name] + value if name in total else value
