"""Atomic creation of folders: a folder is written under a temporary name and renamed when it is complete."""

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


def exchange(temporary: Path, target: Path) -> None:
    """Replace the folder at `target` by `temporary`, a folder that `beside` made, and remove the old folder."""
    old = temporary.with_name(f"{temporary.name}.old")  # not the name of a process, so a later call removes it
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
