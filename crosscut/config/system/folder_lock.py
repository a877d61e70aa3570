"""Lock that lets only one run at a time write into a folder, on a local disk or on a disk that several machines share.

The lock is a file in each folder, created exclusively. The processes that hold the lock renew the file's time every
`BEAT` seconds. On the same machine, another process can see whether these processes still run. On another machine, a
lock counts as abandoned once its file is older than `STALE` seconds. Both times in this comparison are set by the file
system, so the clocks of the machines may differ. If the time of a file is more than `STALE` seconds in the future,
nobody renews the file, so the lock also counts as abandoned.

If a run was halted for longer than `STALE` seconds, another run may have taken its lock. A run therefore calls
`require_held` before it writes.
"""

import errno
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from crosscut.config.errors import ConfigError, TrainingError
from crosscut.config.system.deletion import remove_empty_folder, remove_made
from crosscut.config.system.files import parse_json, write_whole
from crosscut.config.system.machine import machine_identity, process_start
from crosscut.config.system.markers import closing
from crosscut.config.system.records import from_json

LOCK_FILE = ".lock"
BEAT = 5.0
"""Seconds between two renewals of a lock."""
STALE = 60.0
"""Age in seconds after which the lock of another machine counts as abandoned."""
_BEGINNING = b'{"token": "'
"""First bytes of every lock file. A file with other content is not a lock."""
_MOST_BYTES = 1 << 20
"""Maximum size of a lock file. Each process adds about 30 bytes."""
_ENDING = 1.0
"""Seconds to wait before checking again whether the processes of a lock still run. A process that was killed before the
first check has ended by then."""
_SETTLE = 0.5
"""Seconds to wait after taking an abandoned lock. If two processes have taken the same lock, both then see which of
them holds it."""


@dataclass(frozen=True)
class Holder:
    """Content of a lock file: the run that holds the lock."""

    token: str
    """Random name that is new each time a run takes the lock."""
    host: str
    machine: str
    """Identity of the machine or container on which the process numbers in `processes` are valid."""
    processes: dict[str, str]
    """Start time of each process of the run, keyed by process number."""
    since: str
    """Local time at which the lock was taken."""

    @classmethod
    def here(cls, token: str) -> "Holder":
        """Return a holder that describes this process."""
        started = {str(os.getpid()): process_start(os.getpid()) or ""}
        return cls(token, socket.gethostname(), machine_identity(), started, time.strftime("%Y-%m-%d %H:%M:%S"))

    def __post_init__(self) -> None:
        """Raise `ValueError` if a key of `processes` is not a process number, because the file may hold anything."""
        if not all(pid.isascii() and pid.isdigit() and len(pid) < 20 for pid in self.processes):
            raise ValueError("the keys of `processes` must be process numbers")

    @property
    def runs(self) -> bool | None:
        """Whether a process of the holder is still running. None if the holder is on another machine, because only the
        age of the lock then shows whether the process still runs.
        """
        if self.machine != machine_identity():
            return None
        return any(process_start(int(pid)) == started for pid, started in self.processes.items())

    def __str__(self) -> str:
        first = next(iter(self.processes), "unknown")
        return f"process {first} on {self.host} (since {self.since})"


class FolderLock:
    """Lock of one run on its folders. If the object is sent to another process of the run, the copy refers to the same
    lock.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.token = secrets.token_hex(8)
        self.is_lost = False
        """Whether a renewal in this process has found that the lock belongs to another run or is gone."""

    @contextmanager
    def held(self, told: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock of all folders inside the block. Missing folders are created, and removed again if they are
        still empty at the end.

        If another machine holds the lock, taking the lock may take up to `STALE` seconds. In this case, `told` is
        called with a message for the user. Raises `ConfigError` if another run holds the lock, if a folder is not
        writable, or if something other than a file has the name of the lock.
        """
        missing = [folder for folder in self.folders if not folder.exists()]
        try:
            for folder in self.folders:
                _create(folder)
                try:
                    self._acquire(folder, told)
                except OSError as error:
                    raise _not_writable(folder, error) from None
            with self.renewed():
                yield
        finally:
            self._release()
            for folder in missing:
                remove_empty_folder(folder)

    def _acquire(self, folder: Path, told: Callable[[str], None]) -> None:
        path, first_seen = folder / LOCK_FILE, 0.0
        while not self._create_file(path):
            holder = _read(path)
            if holder is None:  # the lock was released in the meantime
                continue
            runs, (seen, age) = holder.runs, self._age(path)
            is_first_look, first_seen = not first_seen, first_seen or seen
            if runs is False or (runs is None and abs(age) > STALE):
                if self._take_over(path):
                    return
                continue
            if not is_first_look and (runs or seen > first_seen):
                raise ConfigError(
                    f"The run's folder must be used by one run at a time, but `{folder}` is in use by {holder}. Wait "
                    "until that run ends, or choose another folder."
                )
            if runs:
                time.sleep(_ENDING)
                continue
            if is_first_look:
                told(
                    f"`{folder}` was used {max(age, 0.0):.0f} s ago by {holder}. Waiting for up to {STALE - age:.0f} "
                    f"s to see whether that run is still alive."
                )
            time.sleep(BEAT / 2)

    def _create_file(self, path: Path) -> bool:
        """Create the lock file. Returns False if it exists."""
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:
                json.dump(asdict(Holder.here(self.token)), file)
        except OSError:  # on a full disk, an empty lock file would count as the lock of another machine
            remove_made(path)
            raise
        return True

    def _take_over(self, path: Path) -> bool:
        """Replace an abandoned lock with this one. Returns False if another process has also replaced the lock, and now
        holds it.
        """
        self._replace(path, Holder.here(self.token))
        time.sleep(_SETTLE)
        return self._is_ours(path)

    def _replace(self, path: Path, holder: Holder) -> None:
        """Write the lock file atomically."""
        write_whole(path, json.dumps(asdict(holder)))

    def _age(self, path: Path) -> tuple[float, float]:
        """Time of a lock file, and its age, in seconds. Both follow the clock of the file system."""
        probe = path.with_name(f"{LOCK_FILE}.{secrets.token_hex(8)}")
        with probe.open("x") as file:
            now = os.fstat(file.fileno()).st_mtime
        remove_made(probe)
        with path.open("rb") as lock:  # see `_read`
            seen = os.fstat(lock.fileno()).st_mtime
        return seen, now - seen

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lock inside the block, in a thread of this process. Several processes of a run may renew the lock
        at the same time. The lock is then held until the last of these processes ends.
        """
        for folder in self.folders:
            self._join(folder / LOCK_FILE)
        ended = threading.Event()
        thread = threading.Thread(target=self._renew, args=(ended,), daemon=True, name="folder lock")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _join(self, path: Path) -> None:
        """Add this process to the holders."""
        holder = _read(path)
        if holder is None or holder.token != self.token or str(os.getpid()) in holder.processes:
            return
        self._replace(path, replace(holder, processes={**holder.processes, **Holder.here(self.token).processes}))

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT):
            for folder in self.folders:
                path = folder / LOCK_FILE
                with suppress(OSError):  # the file system may not respond for a while, so the next renewal decides
                    self.is_lost = not self._is_ours(path)
                    if self.is_lost:
                        return
                    os.utime(path)

    def require_held(self) -> None:
        """Raise `TrainingError` if this run no longer holds its folders, because another run has taken over the lock or
        a folder was moved or removed.
        """
        for folder in self.folders:
            if self.is_lost or not self._is_ours(folder / LOCK_FILE):
                holder = _read(folder / LOCK_FILE)
                cause = "was moved or removed" if holder is None else f"is now used by {holder}"
                raise TrainingError(
                    f"`{folder}` must stay the folder of this run, but {cause}. This run has ended, and has written "
                    "nothing there since. Its earlier checkpoints are safe. If the folder was moved, they are in the "
                    "moved folder. Resume from them with --resume auto."
                )

    def _release(self) -> None:
        """Remove the lock files of this lock. Does nothing in a folder whose lock belongs to another run."""
        for folder in self.folders:
            with suppress(OSError):
                if self._is_ours(folder / LOCK_FILE):
                    remove_made(folder / LOCK_FILE)

    def _is_ours(self, path: Path) -> bool:
        try:
            holder = _read(path)
        except ConfigError:  # the lock's name now belongs to something that is not a file
            return False
        return holder is not None and holder.token == self.token


def _create(folder: Path) -> None:
    """Create a folder if it does not exist. Raises `ConfigError` if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            f"The run's folder must be a folder, but `{folder}` is a file, or a path inside a file. Choose another "
            "name for `output.folder` (or `checkpoint.folder`)."
        ) from None
    except OSError as error:
        raise _not_writable(folder, error) from None


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"The run's folder must be writable, but `{folder}` is not: {error.strerror}. Grant access, or set "
        "`output.folder` (or `checkpoint.folder`) to another folder."
    )


def require_unused(folder: Path) -> None:
    """Raise `ConfigError` if a run holds the lock of a folder, or if the lock is not a file. The folder may be
    read-only, because nothing is written.
    """
    path = folder / LOCK_FILE
    holder = _read(path)
    if holder is None or holder.runs is False:
        return
    if holder.runs or abs(time.time() - path.stat().st_mtime) < STALE:
        raise ConfigError(
            f"The folder must not be in use, but `{folder}` is in use by {holder}. Wait until that run ends."
        )


class Renewal(NamedTuple):
    """Last sign of life of a run that holds the lock of a folder."""

    at: float
    """Time of the lock file, in seconds since the epoch, by the clock of the file system."""
    runs: bool | None
    """Whether a process of the run still runs (`Holder.runs`)."""


def last_renewal(folder: Path) -> Renewal | None:
    """Return when the lock of a folder was last renewed. None if no run holds the lock."""
    try:
        holder = _read(folder / LOCK_FILE)
        if holder is None:
            return None
        return Renewal((folder / LOCK_FILE).stat().st_mtime, holder.runs)
    except (OSError, ConfigError):
        return None


def _read(path: Path) -> Holder | None:
    """Read a lock file. Returns None if there is none. Raises `ConfigError` if a FIFO, a folder, a link or a device has
    the name of the lock; no run creates any of these.

    Opening the file makes NFS ask the server for its content and time. Without opening, NFS could return a cached time
    that is a minute old.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, and a socket
            raise
        raise _not_a_file(path) from None
    with closing(descriptor):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_a_file(path)
        content = os.read(descriptor, _MOST_BYTES)
    if content and not content.startswith(_BEGINNING[: len(content)]):
        raise ConfigError(
            f"`{path}` must be the lock of a run, but Crosscut did not write this file. Move it away, or choose "
            "another folder."
        )
    try:
        return from_json(Holder, parse_json(content))
    except ValueError:  # another process is writing the file, or was killed while writing
        return Holder("", "an unknown machine", "", {}, "an unknown time")


def _not_a_file(path: Path) -> ConfigError:
    return ConfigError(
        f"The lock of a run's folder must be a regular file, but `{path}` is not. If no run uses the folder, remove "
        "this path. Otherwise, choose another folder."
    )
