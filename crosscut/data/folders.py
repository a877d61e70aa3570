"""Atomic creation of folders: a folder is written under a temporary name and renamed when it is complete."""

import errno
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosscut.config.errors import DataError


def is_taken(target: Path) -> bool:
    """Whether a path exists and is not an empty folder."""
    return target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None)


@contextmanager
def beside(target: Path, *, setting: str) -> Iterator[Path]:
    """Create a temporary folder in the parent folder of `target`, and yield its path. At the end of the context, the
    temporary folder is removed unless it was renamed. Temporary folders that dead processes left behind are removed at
    the start.

    Raises `DataError` if the temporary folder cannot be created. The message names the option `setting`.
    """
    prefix = f".{target.name}.unfinished.{socket.gethostname()}."
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f"{glob.escape(prefix)}*"):
            if not _is_alive(left.name.removeprefix(prefix)):
                shutil.rmtree(left, ignore_errors=True)
        temporary = target.parent / f"{prefix}{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise DataError(
            f"`{target}` must be a path where a folder can be created, but is not: {error.strerror}. "
            f"Choose another `{setting}`."
        ) from None
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unwritable(path: Path, error: OSError, *, setting: str, kept: str) -> DataError:
    """Return the error for a folder into which writing failed, for example because the disk is full.

    `setting` is the name of the option that holds the path, and `kept` is a sentence about the work that is not lost.
    """
    reason = os.strerror(error.errno) if error.errno else error  # pyarrow adds text to the system's message
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = next(place for place in (path, *path.absolute().parents) if place.is_dir())
        room = f" ({shutil.disk_usage(place).free / 1e6:,.1f} MB are free)"
    return DataError(
        f"`{path}` must be writable, but writing failed: {reason}{room}. {kept} Free some space or "
        f"choose another `{setting}`, then start the same command again."
    )


def exchange(temporary: Path, target: Path) -> None:
    """Replace the folder at `target` with `temporary`, a folder that `beside` made, and remove the old folder."""
    # If this process dies, a later `beside` removes the old folder, because its name does not end in a process id.
    old = temporary.with_name(f"{temporary.name}.old")
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:
        return True
    return True
