"""Removal and replacement of files and folders: the only module of the package that removes anything.

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
import json
import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.config.errors import ConfigError

MARKER_FILE = ".crosscut"
DRAFT = "draft"
"""Id in the marker of a temporary folder beside a folder that the user named, which is complete when it is renamed."""
_MOST_BYTES = 4096
_OBJECTS = "aws s3 rm --recursive"
"""Command that removes a folder of the most common object store."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

Names = Callable[[str], bool]
"""Function that says whether Crosscut writes a file of this name to a folder."""


class ForeignFolderError(ConfigError, OSError):
    """Error for a folder that Crosscut would have to fill or remove, but did not make."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EEXIST, f"It is not a folder that Crosscut made: {why}", str(path))
        self.path, self.why = path, why

    @property
    def told(self) -> str:
        """Sentence for the user, with the command that removes the folder."""
        return told(self.path, self.why)

    def __str__(self) -> str:
        return f"Crosscut must be able to use `{self.path}`, but did not make it. {self.told}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.why)


def told(path: object, why: str, *, remove: str = "rm -r") -> str:
    """Return the sentence about a folder that stays because Crosscut cannot prove that it wrote it."""
    return (
        f"`{path}` stays, because Crosscut removes only what it wrote, but {why}. If nobody needs it, remove it with "
        f"`{remove} {shlex.quote(str(path))}`."
    )


@dataclass(frozen=True)
class Marker:
    """Content of a marker."""

    id: str
    """Id of the run or the corpus."""
    folder: str = ""
    """Name of the folder when it is complete. Empty in a root, which is never removed."""

    def content(self) -> bytes:
        """Return the marker as JSON."""
        return json.dumps({"id": self.id, "folder": self.folder}).encode() + b"\n"

    @classmethod
    def parse(cls, content: bytes) -> "Marker | None":
        """Parse the content of a marker. Returns None if Crosscut cannot have written it."""
        try:
            table = json.loads(content)
            found = cls(table["id"], table["folder"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return found if type(found.id) is type(found.folder) is str and found.id else None


def marker_of(folder: Path) -> Marker | None:
    """Read the marker of a folder. The folder itself may be a link. Returns None if the folder has no valid marker."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return _read_marker(descriptor)
    finally:
        os.close(descriptor)


def claim(root: Path, part: str = "") -> str:
    """Return the id of a root, which must exist. A root without an id gets the id in the marker of its folder `part`,
    because `cp -r run/* copy` leaves only the marker of the root behind. Otherwise, it gets a new one. Several
    processes may claim a root at the same time. Raises `OSError` if the marker cannot be written, and
    `ForeignFolderError` if something else has its name.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = _read_marker(descriptor)
        found = found or _mark(descriptor, root, Marker(_id_of_part(descriptor, root / part) or secrets.token_hex(8)))
        if not found.id:
            raise ForeignFolderError(root / MARKER_FILE, "Crosscut did not write it")
        return found.id
    finally:
        os.close(descriptor)


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
        with _opened(root) as parent, _entered(parent, path) as folder:
            found = _read_marker(folder)
            if found is None and (foreign := _first_foreign(folder, lambda _: False)):
                found = _read_marker(folder)  # another process may have marked and filled the folder in the meantime
            elif found is None:
                found = _mark(folder, path, marker, durable=durable)
            if found != marker:
                raise ForeignFolderError(path, _no_marker(found, "" if found else foreign))
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
    with _opened(root) as parent, _entered(parent, path):
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
    path = root / name
    try:
        with _opened(root) as parent, _entered(parent, path) as folder:
            owner = id or getattr(_read_marker(parent), "id", "")
            if why := _why_foreign(folder, Marker(owner, of or name), only):
                return told(path, why)
            if hidden:
                if left := remove_folder(root, hidden, of=of or name, id=owner):
                    return left
                os.rename(name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
            _empty(folder)
            os.rmdir(hidden or name, dir_fd=parent)
            return ""
    except FileNotFoundError:
        return ""
    except ForeignFolderError as error:
        return error.told


def why_kept(root: Path, name: str, *, of: str = "", id: str = "", only: Names | None = None) -> str:  # noqa: A002
    """Return the sentence that `remove_folder` would return, without removing anything. Empty if the folder could be
    removed or does not exist.
    """
    try:
        with _opened(root) as parent, _entered(parent, root / name) as folder:
            owner = id or getattr(_read_marker(parent), "id", "")
            why = _why_foreign(folder, Marker(owner, of or name), only)
            return told(root / name, why) if why else ""
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
    with _opened(root) as parent, _entered(parent, root / name) as folder:
        _mark(folder, root / name, marker)


def rename_folder(old: Path, new: Path) -> None:
    """Rename a folder that this run or corpus wrote. Raises `OSError` if `new` exists and is not an empty folder."""
    if not stat.S_ISDIR(old.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(old))
    old.rename(new)


def why_not_private(base: Path, *names: str) -> str:
    """Return why the folders `names`, each in the folder before, are not safe from other users in the folder `base`,
    such as /dev/shm. The first of the folders is made if it is missing; the others may be missing. Empty if they are
    safe: none is a link, each belongs to this user, and nobody else may write to it or enter the folder above it.
    Raises `OSError`.
    """
    with suppress(FileExistsError):
        (base / names[0]).mkdir(mode=0o700, parents=True)
    status = base.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        return f"other users may rename the folders in `{base}`"  # a folder could be exchanged after this check
    path, is_open = base, True
    for name in names:
        path = path / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            return ""
        if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
            return f"`{path}` is a link" if stat.S_ISLNK(status.st_mode) else f"`{path}` is not a folder"
        if status.st_uid != os.getuid():
            return "another user owns it" if path == base / names[0] else f"another user owns `{path}`"
        if is_open and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"other users may write to `{path}`"
        is_open = is_open and bool(status.st_mode & (stat.S_IXGRP | stat.S_IXOTH))  # what others cannot enter is safe
    return ""


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
        with _opened(path.parent) as folder:
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if _read_marker(folder) is None or not stat.S_ISREG(status.st_mode):
                return False
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        pass
    return True


def remove_empty_folder(folder: Path) -> None:
    """Remove a folder that is empty. Any other folder stays."""
    with suppress(OSError):
        folder.rmdir()


class Prefix:
    """Folder of an object store (`store`, of fsspec) in which the run makes and removes folders. The same rules hold as
    on a disk, with an object in place of the marker file.
    """

    def __init__(self, store: Any, root: str) -> None:
        self.store, self.root = store, root

    def claim(self) -> str:
        """Return the id of the folder. A folder without an id gets a new one."""
        if found := self.marker(self.root):
            return found.id
        marker = Marker(secrets.token_hex(8))
        self.store.pipe_file(f"{self.root}/{MARKER_FILE}", marker.content())
        return marker.id

    def marker(self, path: str) -> Marker | None:
        """Read the marker of a folder."""
        try:
            return Marker.parse(self.store.cat_file(f"{path}/{MARKER_FILE}", end=_MOST_BYTES))
        except FileNotFoundError:
            return None

    def make(self, name: str, id: str = "") -> None:  # noqa: A002
        """Make the folder `name`, which must be empty or absent."""
        marker = Marker(id or self.claim(), name)
        self.store.pipe_file(f"{self.root}/{name}/{MARKER_FILE}", marker.content())

    def remove(self, name: str, *, last: str, id: str = "", only: Names, shown: str) -> str:  # noqa: A002
        """Remove the folder `name`, and the object `last` in it before all others. Returns an empty text, or the
        sentence that says why the folder stays. `only` says which names Crosscut writes to the folder, and `shown` is
        the folder's URL.
        """
        path = f"{self.root}/{name}"
        if left := self.why_kept(name, id=id, only=only, shown=shown):
            return left
        for one in sorted(self.objects(path), key=lambda one: (one == MARKER_FILE, one != last)):
            self.store.rm_file(f"{path}/{one}")
        self._remove_empty(path)
        return ""

    def why_kept(self, name: str, *, id: str = "", only: Names, shown: str) -> str:  # noqa: A002
        """Return the sentence that `remove` would return, without removing anything."""
        path = f"{self.root}/{name}"
        objects = self.objects(path)
        if not objects:
            return ""
        wanted = Marker(id or getattr(self.marker(self.root), "id", ""), name)
        found = self.marker(path)
        if found != wanted or not wanted.id:
            return told(shown, _no_marker(found, ""), remove=_OBJECTS)
        strange = [one for one in objects if one != MARKER_FILE and not only(one)]
        return told(shown, _holds(strange[0]), remove=_OBJECTS) if strange else ""

    def _remove_empty(self, path: str) -> None:
        """Remove a folder without objects, in stores in which folders are more than parts of names."""
        self.store.invalidate_cache()
        if self.store.exists(path) and not self.objects(path):
            self.store.rm(path, recursive=True)

    def objects(self, path: str) -> list[str]:
        """Return the names of all objects below a folder, relative to the folder."""
        return sorted(str(name).removeprefix(path).lstrip("/") for name in self.store.find(path))

    def unmark(self, name: str) -> None:
        """Remove the marker of a folder that is complete and now belongs to the user."""
        self.store.rm_file(f"{self.root}/{name}/{MARKER_FILE}")

    def rename(self, old: str, new: str) -> None:
        """Rename a folder by copying and removing. `new` must not exist."""
        if self.objects(f"{self.root}/{new}"):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.root}/{new}")
        self.store.mv(f"{self.root}/{old}", f"{self.root}/{new}", recursive=True)


@contextmanager
def _opened(root: Path) -> Iterator[int]:
    """Open a root. Links up to the root are followed."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _id_of_part(root: int, path: Path) -> str:
    """Return the id in the marker of the folder `path` in an open root. Empty if the marker is not that of a folder of
    this name in a root.
    """
    with suppress(OSError), _entered(root, path) as folder:
        found = _read_marker(folder)
        return found.id if found and found.folder == path.name and found.id != DRAFT else ""
    return ""


def _why_foreign(folder: int, wanted: Marker, only: Names | None) -> str:
    """Return why an open folder must stay. Empty if Crosscut wrote the folder and everything in it."""
    found = _read_marker(folder)
    if found is None and not _first_foreign(folder, lambda _: False):
        return ""  # empty
    if found != wanted or not wanted.id:
        return _no_marker(found, "")
    if only is not None and (name := _first_foreign(folder, only)):
        return _holds(name)
    return ""


def _no_marker(found: Marker | None, holds: str) -> str:
    if found is None:
        return f"it has no marker `{MARKER_FILE}`{f' and holds `{holds}`' if holds else ''}"
    return f"its marker `{MARKER_FILE}` is that of another folder"


def _holds(name: str) -> str:
    return f"it holds `{name}`, which Crosscut did not write"


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


def _read_marker(folder: int) -> Marker | None:
    try:
        descriptor = os.open(MARKER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return Marker.parse(os.read(descriptor, _MOST_BYTES))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _mark(folder: int, path: Path, marker: Marker, *, durable: bool = True) -> Marker:
    """Write the marker of an open folder, atomically, and return it. `path` is the folder's path for messages. If
    another process has written a marker in the meantime, return that marker. If something else has the name of the
    marker, return a marker without an id. Raises `OSError` with the path.
    """
    temporary = f"{MARKER_FILE}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        try:
            os.write(descriptor, marker.content())
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return marker if _named(folder, temporary) else _read_marker(folder) or Marker("")
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
