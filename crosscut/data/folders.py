"""Atomic creation of folders: a folder is written under a temporary name and renamed when it is complete."""

import errno
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crosscut.config.errors import DataError
from crosscut.config.system.deletion import claim, make_folder, remove_folder, rename_folder, unmark
from crosscut.config.system.markers import DRAFT, Names
from crosscut.config.system.terminal import echo

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, or of a file that may not grow."""


def is_taken(target: Path) -> bool:
    """Whether a path exists and is not an empty folder."""
    return target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None)


@contextmanager
def beside(target: Path, *, setting: str, root: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder in the parent folder of `target`, and yield its path. At the end of the context, the
    temporary folder is removed unless it was renamed. Temporary folders that dead processes left behind are removed at
    the start.

    The temporary folder has a marker. If `root` is the parent folder of `target`, the marker has the id of this root,
    and stays when the folder is complete. Otherwise, call `complete`. Raises `OSError` if the disk is full, and
    `DataError` if the temporary folder cannot be created for another reason. The message names the option `setting`.
    """
    above = target.absolute().parent
    prefix = f".{target.name}.unfinished.{socket.gethostname()}."
    try:
        above.mkdir(parents=True, exist_ok=True)
        owner = claim(root) if root else DRAFT
        for left in above.glob(f"{glob.escape(prefix)}*"):
            if not _is_alive(left.name.removeprefix(prefix)):
                _remove(above, left.name, target.name, owner)
        name = f"{prefix}{os.getpid()}"
        _remove(above, name, target.name, owner)
        make_folder(above, name, of=target.name, id=owner)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise DataError(
            f"`{target}` must be a path where a folder can be created, but is not: {error.strerror}. "
            f"Choose another `{setting}`."
        ) from None
    try:
        yield target.parent / name
    finally:
        with suppress(OSError):
            remove_folder(above, name, of=target.name, id=owner)


def _remove(above: Path, name: str, of: str, owner: str) -> None:
    """Remove a temporary folder that a dead process left behind. A folder that stays is named."""
    if left := remove_folder(above, name, of=of, id=owner):
        echo(f"crosscut: {left}", err=True)


def complete(temporary: Path, target: Path) -> None:
    """Rename a folder that `beside` made to `target`, which must be empty or absent. The folder then belongs to the
    user. Raises `OSError` if `target` is taken.
    """
    rename_folder(temporary, target)
    unmark(target)


def unwritable(path: Path, error: OSError, *, setting: str, kept: str) -> DataError:
    """Return the error for a folder into which writing failed, for example because the disk is full.

    `setting` is the name of the option that holds the path, and `kept` is a sentence about the work that is not lost.
    """
    reason = os.strerror(error.errno) if error.errno else error  # pyarrow adds text to the system's message
    room = ""
    if error.errno in _FULL and error.errno != errno.EFBIG:
        place = next(place for place in (path, *path.absolute().parents) if place.is_dir())
        room = f" ({shutil.disk_usage(place).free / 1e6:,.1f} MB are free)"
    return DataError(
        f"`{path}` must be writable, but writing failed: {reason}{room}. {kept} Free some space or "
        f"choose another `{setting}`, then start the same command again."
    )


def exchange(temporary: Path, target: Path, only: Names) -> None:
    """Replace the folder at `target` with `temporary`, a folder that `beside` made, and remove the old folder. `only`
    says which names Crosscut writes to the folder. Call this function only if nothing speaks against the removal of
    `target` (`deletion.why_kept`).
    """
    # If this process dies, a later `beside` removes the old folder, because its name does not end in a process id.
    old = temporary.with_name(f"{temporary.name}.old")
    if target.exists():
        rename_folder(target, old)
    rename_folder(temporary, target)
    if left := remove_folder(old.absolute().parent, old.name, of=target.name, only=only):
        echo(f"crosscut: {left}", err=True)


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except OSError:
        return True
    return True
