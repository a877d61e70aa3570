"""Removal and replacement of files and folders: with `object_deletion`, the only module that removes anything.

Crosscut removes only what it can prove that it wrote. The proof is a marker: a file `.crosscut` that holds the id of a
run or a corpus. The folder that the user named (the root) has a marker with the id. Each folder that Crosscut makes
below the root, and may have to remove later, gets a marker with the same id and with the name of the folder, so that a
copy under another name is not mistaken for the original. A folder is removed only if its marker has both. A complete
folder must also hold nothing but files with the names that Crosscut writes there. Any other folder stays, and the
caller gets a sentence that names it, with the command that removes it.

Links up to the root are followed, links below it never. A folder is opened first (`O_NOFOLLOW`), then checked, and then
emptied through the open folder, so a folder that somebody exchanges in the meantime is not touched.

The ids move with the folders: a run may be moved or copied. A process that is killed between the creation of a folder
and its marker leaves an empty folder, which may be removed or used by anybody.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crosscut.config.system.markers import (
    DRAFT,
    MARKER_FILE,
    ForeignFolderError,
    Marker,
    Names,
    closing,
    opened,
    read_marker,
    told,
    why_no_marker,
    why_strange,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def claim(root: Path, part: str = "") -> str:
    """Return the id of a root, which must exist. A root without an id gets the id in the marker of its folder `part`,
    because `cp -r run/* copy` leaves only the marker of the root behind. Otherwise, it gets a new one. Several
    processes may claim a root at the same time. Raises `OSError` if the marker cannot be written, and
    `ForeignFolderError` if something else has its name.
    """
    with opened(root) as folder:
        found = read_marker(folder)
        found = found or _mark(folder, root, Marker(_id_of_part(folder, root / part) or secrets.token_hex(8)))
        if not found.id:
            raise ForeignFolderError(root / MARKER_FILE, "Crosscut did not write it")
        return found.id


def make_folder(root: Path, name: str, *, of: str = "", id: str = "", durable: bool = True) -> Path:  # noqa: A002
    """Make the folder `name` in `root`, with a marker, and return its path. `of` is the name that the folder will have
    when it is complete. `id` is by default the id of the root. Folders above are created as needed.

    A folder that exists is used if it is empty or has this marker. Raises `ForeignFolderError` for any other folder, or
    for a link or a file in its place. If not `durable`, the marker may be lost in a power failure.
    """
    if not root.exists():
        root.mkdir(parents=True, exist_ok=True)
    marker = Marker(id or claim(root, name), of or name)
    path, is_new = root / name, False
    with suppress(FileExistsError):
        path.mkdir()
        is_new = True
    try:
        with opened(root) as parent, _entered(parent, path) as folder:
            found = read_marker(folder)
            if found is None and (foreign := _first_foreign(folder, lambda _: False)):
                found = read_marker(folder)  # another process may have marked and filled the folder in the meantime
            elif found is None:
                found = _mark(folder, path, marker, durable=durable)
            if found != marker:
                raise ForeignFolderError(path, why_no_marker(found, "" if found else foreign))
    except OSError:  # such as a full disk
        if is_new:
            remove_empty_folder(path)
        raise
    return path


def enter_folder(root: Path, name: str) -> Path:
    """Make the folder `name` in `root`, to which files are only added, and return its path. A folder that exists is
    used as it is. Raises `ForeignFolderError` for a link or a file in its place.
    """
    path = root / name
    if not path.exists():
        return make_folder(root, name)
    with opened(root) as parent, _entered(parent, path):
        return path


def remove_folder(
    root: Path,
    name: str,
    *,
    of: str = "",
    id: str = "",  # noqa: A002
    only: Names | None = None,
    hidden: str = "",
) -> str:
    """Remove the folder `name` in `root`, if Crosscut can prove that it wrote the folder and everything in it. Returns
    an empty text if the folder is gone, and otherwise the sentence that says why the folder stays.

    `of` is the name in the marker (by default `name`), and `id` the id in the marker (by default the id of the root).
    `only` says which names Crosscut writes to the folder. Without it, the folder is a draft, in which everything goes.
    With `hidden`, the folder first gets this name, so that nobody sees an incomplete folder. Raises `OSError` if the
    system refuses the removal.
    """

    def remove(parent: int, folder: int, owner: str) -> str:
        if hidden:
            if left := remove_folder(root, hidden, of=of or name, id=owner):
                return left
            os.rename(name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
        _empty(folder)
        os.rmdir(hidden or name, dir_fd=parent)
        return ""

    return _if_proven(root / name, Marker(id, of or name), only, remove)


def why_kept(root: Path, name: str, *, of: str = "", id: str = "", only: Names | None = None) -> str:  # noqa: A002
    """Return the sentence that `remove_folder` would return, without removing anything. Empty if the folder could be
    removed or does not exist.
    """
    return _if_proven(root / name, Marker(id, of or name), only, lambda *_: "")


def _if_proven(path: Path, wanted: Marker, only: Names | None, act: Callable[[int, int, str], str]) -> str:
    """Call `act` with the open folder above `path`, the open folder itself and the id of its owner, if Crosscut wrote
    the folder, and return the result of the call. Otherwise, return the sentence that says why the folder stays. Empty
    if there is no folder. If `wanted` has no id, it is that of the folder above.
    """
    try:
        with opened(path.parent) as parent, _entered(parent, path) as folder:
            owner = wanted.id or getattr(read_marker(parent), "id", "")
            why = _why_foreign(folder, Marker(owner, wanted.folder), only)
            return told(path, why) if why else act(parent, folder, owner)
    except FileNotFoundError:
        return ""
    except ForeignFolderError as error:
        return error.told


def remove_if_empty(root: Path, name: str, *, id: str = "") -> None:  # noqa: A002
    """Remove the folder `name` in `root` if it has a marker of the root (or the marker `id`) and holds nothing else."""
    with suppress(OSError):
        remove_folder(root, name, id=id, only=lambda _: False)


def unmark(folder: Path) -> None:
    """Remove the marker of a folder that is complete and now belongs to the user."""
    (folder / MARKER_FILE).unlink(missing_ok=True)


def adopt(root: Path, name: str) -> None:
    """Give the folder `name` in `root` a marker. Call this function only for a folder whose whole content is proven to
    be Crosscut's, such as a folder that was copied without its hidden files.
    """
    marker = Marker(claim(root), name)
    with opened(root) as parent, _entered(parent, root / name) as folder:
        _mark(folder, root / name, marker)


def rename_folder(old: Path, new: Path) -> None:
    """Rename a folder that this run or corpus wrote. Raises `OSError` if `new` exists and is not an empty folder."""
    if not stat.S_ISDIR(old.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(old))
    old.rename(new)


def replace_file(temporary: Path, path: Path) -> None:
    """Rename a file that this process made to `path`. A file at `path` is replaced. Raises `OSError`."""
    temporary.replace(path)


def remove_made(path: Path) -> None:
    """Remove a file that this process made, such as a lock or an incomplete file. Does nothing if it is gone."""
    path.unlink(missing_ok=True)


def remove_file(path: Path) -> bool:
    """Remove a file from a folder that has a marker, and return whether it is gone. A link, and anything in a folder
    without a marker, stays. Raises `OSError` if the system refuses the removal.
    """
    try:
        with opened(path.parent) as folder:
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if read_marker(folder) is None or not stat.S_ISREG(status.st_mode):
                return False
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        pass
    return True


def remove_empty_folder(folder: Path) -> None:
    """Remove a folder that is empty. Any other folder stays."""
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _entered(parent: int, path: Path) -> Iterator[int]:
    """Open a folder in the open folder `parent`. Raises `FileNotFoundError` if there is none, and `ForeignFolderError`
    if it is a link or a file.
    """
    try:
        descriptor = os.open(path.name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        is_link = stat.S_ISLNK(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode)
        raise ForeignFolderError(path, "it is a link" if is_link else "it is not a folder") from None
    with closing(descriptor):
        yield descriptor


def _id_of_part(root: int, path: Path) -> str:
    """Return the id in the marker of the folder `path` in an open root. Empty if the marker is not that of a folder of
    this name in a root.
    """
    with suppress(OSError), _entered(root, path) as folder:
        found = read_marker(folder)
        return found.id if found and found.folder == path.name and found.id != DRAFT else ""
    return ""


def _why_foreign(folder: int, wanted: Marker, only: Names | None) -> str:
    """Return why an open folder must stay. Empty if Crosscut wrote the folder and everything in it."""
    found = read_marker(folder)
    if found is None and not _first_foreign(folder, lambda _: False):
        return ""  # empty
    if found != wanted or not wanted.id:
        return why_no_marker(found)
    if only is not None and (name := _first_foreign(folder, only)):
        return why_strange(name)
    return ""


def _first_foreign(folder: int, only: Names) -> str:
    """Return the name of something in an open folder that is not a marker or a file with a name in `only`."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_marker = entry.name == MARKER_FILE or entry.name.startswith(f"{MARKER_FILE}.")
            if not (is_marker or only(entry.name)) or not entry.is_file(follow_symlinks=False):
                return entry.name
    return ""


def _empty(folder: int) -> None:
    """Remove everything in an open folder, and its marker last."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in sorted(found, key=lambda pair: pair[0] == MARKER_FILE):
        if is_folder:
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def _mark(folder: int, path: Path, marker: Marker, *, durable: bool = True) -> Marker:
    """Write the marker of an open folder, atomically, and return it. `path` is the folder's path for messages. If
    another process has written a marker in the meantime, return that marker. If something else has the name of the
    marker, return a marker without an id. Raises `OSError` with the path.
    """
    temporary = f"{MARKER_FILE}.{secrets.token_hex(4)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with closing(os.open(temporary, flags, 0o666, dir_fd=folder)) as descriptor:
            os.write(descriptor, marker.content())
            if durable:
                os.fsync(descriptor)
        return marker if _named(folder, temporary) else read_marker(folder) or Marker("")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path / MARKER_FILE)) from None
    finally:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)


def _named(folder: int, temporary: str) -> bool:
    """Give a file the name of the marker. Returns False if the name is taken."""
    try:
        os.link(temporary, MARKER_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if MARKER_FILE in os.listdir(folder):
            return False
        os.rename(temporary, MARKER_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    return True
