"""Folders that are whole or not there: made under another name beside their place, and renamed when they are whole."""

import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosscut.config.errors import DataError


def is_taken(target: Path) -> bool:
    """Whether there is anything at a place but an empty folder."""
    return target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None)


@contextmanager
def beside(target: Path, *, setting: str) -> Iterator[Path]:
    """A temporary folder beside `target`, removed in the end unless it was renamed; also removes those of the dead.

    Raises `DataError`, which names `setting`, where no folder can be made.
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
            f"`{target}` must be a place where a folder can be made, but is not: {error.strerror}. "
            f"Choose another `{setting}`."
        ) from None
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def exchange(temporary: Path, target: Path) -> None:
    """Put a folder of `beside` in the place of the one that is there, which is removed."""
    old = temporary.with_name(f"{temporary.name}.old")  # the name of no process: the next one removes it
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
