"""Store checkpoints in folders, on a file system or on an object store that fsspec supports.

The two kinds of storage publish a folder atomically in different ways. On a file system, the checkpoint is written to a
hidden folder, every file and folder is flushed to the disk, and the hidden folder is renamed. An object store cannot
rename a folder. On an object store, files are written with their final names, and the checkpoint is complete as soon as
its last file, the manifest, exists. `begin`, `publish` and `remove` hide this difference from the rest of the package.

Each folder gets a marker when it is begun, and only a folder with a marker is removed (`config.system.deletion`).
"""

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

from crosscut.config import CheckpointError
from crosscut.config.system import deletion
from crosscut.config.system.extras import install_command
from crosscut.config.system.files import MOST_BYTES, flush_to_disk, require_regular, too_large
from crosscut.config.system.markers import DRAFT, MARKER_FILE, ForeignFolderError, Names
from crosscut.config.system.object_deletion import Prefix

DRAFT_SUFFIX = ".partial"
"""Suffix of the hidden folder in which a checkpoint is written until it is complete."""
DROPPED_SUFFIX = ".dropped"
"""Suffix of the hidden folder to which a checkpoint is renamed before its files are removed."""


_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "oss", "oci"})
"""URL protocols of object stores in which folders exist only as parts of object names. Creating a folder in such a
store would create a bucket, for example under a mistyped name."""


@dataclass(frozen=True)
class Folder(ABC):
    """A folder, given by its path or URL. The object is small and can be sent to other processes."""

    is_alone: bool = field(default=False, kw_only=True)
    """Whether the user named the folder (see `alone`)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Last component of the path."""

    @abstractmethod
    def __truediv__(self, name: str) -> Self:
        """Subfolder with this name."""

    @property
    def alone(self) -> Self:
        """This folder as one that the user named. Its draft has a marker of its own, and the complete folder has none,
        because it then belongs to the user. Any other folder belongs to a run, whose id is in the folder above.
        """
        return replace(self, is_alone=True)

    @property
    def _id(self) -> str:
        return DRAFT if self.is_alone else ""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Sizes in bytes of the files directly in the folder, by name. Empty if the folder does not exist."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Sorted names of the subfolders. Empty if the folder does not exist."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file of the folder for reading."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file of the folder for writing. The file is durable when the context ends without an error."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a file or subfolder of the folder."""

    @abstractmethod
    def draft(self) -> Self:
        """Folder to which the files are written before `publish`. On an object store, this is the folder itself."""

    @abstractmethod
    def begin(self, last: str) -> None:
        """Create this folder as an empty draft, and remove existing files. `last` is the name of the file that is
        written last. On an object store, the folder is complete as soon as this file exists. Raises `CheckpointError`
        if a folder of this name exists that Crosscut may not remove.
        """

    @abstractmethod
    def publish(self, draft: Self, last: str, only: Names) -> None:
        """Publish a complete draft as this folder. An existing folder is removed first (see `remove`). No reader ever
        sees an incomplete folder. `last` is the name of the file that was written last. Raises `CheckpointError` if a
        folder of this name exists that Crosscut may not remove.
        """

    @abstractmethod
    def remove(self, last: str, only: Names) -> str:
        """Remove the folder with all its files. On an object store, the file `last` is removed first, so that an
        incomplete folder is never mistaken for a complete folder. Returns an empty text, or the sentence that says why
        the folder stays: it has no marker of the run, or holds files whose names are not in `only`.
        """

    @abstractmethod
    def why_kept(self, only: Names) -> str:
        """Return the sentence that `remove` would return, without removing anything."""

    def read(self, name: str, *, most_bytes: int = MOST_BYTES) -> bytes:
        """Content of a small file. Raises `OSError` if the file cannot be read or is larger than `most_bytes`."""
        with self.open(name) as file:
            if file.seek(0, os.SEEK_END) > most_bytes:  # a sparse file may be very large without using disk space
                raise too_large(name, most_bytes)
            file.seek(0)
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a small file. The file is stored durably on return."""
        with self.create(name) as file:
            file.write(content)


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A folder of a file system, where a folder can be renamed atomically."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.path.name

    def __truediv__(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    @property
    def _root(self) -> Path:
        return self.path.parent

    @property
    def _final_name(self) -> str:
        """Name of the folder when it is complete."""
        if not self.name.startswith("."):
            return self.name
        return self.name[1:].removesuffix(DRAFT_SUFFIX).removesuffix(DROPPED_SUFFIX)

    def files(self) -> dict[str, int]:
        """Sizes in bytes of the files, by name."""
        found = (path for path in self._entries() if not path.name.startswith(MARKER_FILE))
        return {path.name: path.stat().st_size for path in found if path.is_file()}

    def folders(self) -> list[str]:
        """Names of the subfolders."""
        return [path.name for path in self._entries() if path.is_dir()]

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading. Raises `OSError` if it is not a regular file."""
        require_regular(self.path / name)
        return (self.path / name).open("rb")

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing. The file is flushed to the disk when the context ends. An existing file, pipe or
        link with this name is replaced, so that nothing is written through a pipe or link. The name may begin with that
        of a subfolder, which is created.
        """
        path = self.path / name
        if path.parent != self.path:
            path.parent.mkdir(parents=True, exist_ok=True)
        is_taken = path.is_symlink() or path.exists()
        written = path.with_name(f".{name}.{secrets.token_hex(4)}") if is_taken else path
        with written.open("xb") as file:
            try:
                yield file
            except BaseException:
                deletion.remove_made(written)
                raise
            file.flush()
            os.fsync(file.fileno())
        if is_taken:
            deletion.replace_file(written, path)

    def rename(self, old: str, new: str) -> None:
        """Rename a subfolder and flush the change to the disk."""
        deletion.rename_folder(self.path / old, self.path / new)
        flush_to_disk(self.path)

    def draft(self) -> "LocalFolder":
        """Hidden folder beside this folder. The checkpoint is written there until `publish` renames it."""
        return replace(self, path=self.path.with_name(f".{self.name}{DRAFT_SUFFIX}"))

    def begin(self, last: str) -> None:  # noqa: ARG002 - renaming does not depend on the last file
        """Create the folder. Remains of a killed run are removed first."""
        if left := deletion.remove_folder(self._root, self.name, of=self._final_name, id=self._id):
            raise CheckpointError(left)
        self.make()

    def make(self) -> None:
        """Create the folder as a draft, unless it exists. Several processes may call this method at the same time."""
        try:
            deletion.make_folder(self._root, self.name, of=self._final_name, id=self._id)
        except ForeignFolderError as error:
            raise CheckpointError(error.told) from None

    def publish(self, draft: "LocalFolder", last: str, only: Names) -> None:
        """Give `draft`, the folder with the complete checkpoint, the name of this folder. An existing folder with this
        name is removed first.
        """
        flush_to_disk(draft.path)
        if left := self.remove(last, only):
            raise CheckpointError(left)
        deletion.rename_folder(draft.path, self.path)
        if self.is_alone:
            deletion.unmark(self.path)
        flush_to_disk(self.path.parent)
        flush_to_disk(self.path.parent.parent)  # the folder of all checkpoints may be new

    def remove(self, last: str, only: Names) -> str:  # noqa: ARG002 - see `begin`
        """Rename the folder to a hidden name, then remove its files, so that no incomplete folder is visible under the
        original name. In a folder that is already hidden, everything is removed.
        """
        if self.name.startswith("."):
            return deletion.remove_folder(self._root, self.name, of=self._final_name, id=self._id)
        hidden = f".{self.name}{DROPPED_SUFFIX}"
        return deletion.remove_folder(self._root, self.name, id=self._id, only=only, hidden=hidden)

    def why_kept(self, only: Names) -> str:
        """Return the sentence that `remove` would return."""
        of, is_hidden = self._final_name, self.name.startswith(".")
        return deletion.why_kept(self._root, self.name, of=of, id=self._id, only=None if is_hidden else only)


@dataclass(frozen=True)
class ObjectFolder(Folder):
    """A folder of an object store. Options and credentials come from fsspec's own configuration."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rpartition("/")[2]

    def __truediv__(self, name: str) -> "ObjectFolder":
        return ObjectFolder(f"{self.url}/{name}")

    def _above(self) -> Prefix:
        """Return the folder above."""
        store, path = self._store()
        return Prefix(store, path.rpartition("/")[0])

    def _store(self) -> tuple[Any, str]:
        """Return fsspec's file system for the URL, and the path within this file system. fsspec caches one file system
        per configuration.
        """
        from fsspec.core import url_to_fs

        store, path = url_to_fs(self.url)
        store.invalidate_cache()  # other processes write as well
        return store, path

    def _entries(self, kind: str) -> dict[str, int]:
        with storage_errors_told(self, "a folder that can be read"):
            store, path = self._store()
            try:
                entries = store.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        found = {str(e["name"]).rstrip("/").rpartition("/")[2]: e for e in entries if e["name"].rstrip("/") != path}
        return {name: int(entry["size"] or 0) for name, entry in sorted(found.items()) if entry["type"] == kind}

    def files(self) -> dict[str, int]:
        """Sizes in bytes of the objects, by name."""
        return {name: size for name, size in self._entries("file").items() if name != MARKER_FILE}

    def folders(self) -> list[str]:
        """Names of the prefixes directly below the folder's prefix."""
        return list(self._entries("directory"))

    def open(self, name: str) -> IO[bytes]:
        """Open an object for reading."""
        store, path = self._store()
        file: IO[bytes] = store.open(f"{path}/{name}", "rb")
        return file

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open an object for writing. The object exists after the context has ended."""
        store, path = self._store()
        file = store.open(f"{path}/{name}", "wb")
        try:
            yield file
        except BaseException:
            file.discard()  # `close` would store the incomplete content as a complete object
            raise
        file.close()

    def rename(self, old: str, new: str) -> None:
        """Rename a subfolder by copying and removing, because object stores cannot rename."""
        Prefix(*self._store()).rename(old, new)

    def draft(self) -> "ObjectFolder":
        """The folder itself, which does not count as a checkpoint until its last file exists."""
        return self

    def begin(self, last: str) -> None:
        """Remove the objects of the folder. If the store has real folders, create the folder."""
        if left := self.remove(last, lambda _: True):
            raise CheckpointError(left)
        store, path = self._store()
        if not _BUCKETS.intersection([store.protocol] if isinstance(store.protocol, str) else store.protocol):
            store.makedirs(path, exist_ok=True)
        self._above().make(self.name, self._id)

    def publish(self, draft: "ObjectFolder", last: str, only: Names) -> None:  # noqa: ARG002 - nothing is replaced
        """Remove the marker of a folder that the user named. The last file already completes the folder."""
        if self.is_alone:
            self._above().unmark(self.name)

    def remove(self, last: str, only: Names) -> str:
        """Remove the folder with all its files. The file whose name is `last` is removed first: the folder counts as
        complete only while this file exists.
        """
        return self._above().remove(self.name, last=last, id=self._id, only=only, shown=self.url)

    def why_kept(self, only: Names) -> str:
        """Return the sentence that `remove` would return."""
        return self._above().why_kept(self.name, id=self._id, only=only, shown=self.url)


def folder_at(location: "str | Path | Folder") -> Folder:
    """Return the folder at a path or at an fsspec URL such as `s3://bucket/run`.

    Raises `CheckpointError` for a URL with a protocol that fsspec does not support or whose package is not installed.
    """
    if isinstance(location, Folder):
        return location
    text = str(location).removeprefix("file://").removeprefix("local://")
    if isinstance(location, Path) or "://" not in text:
        return LocalFolder(Path(text))
    folder = ObjectFolder(text.rstrip("/"))
    try:
        from fsspec.core import split_protocol
        from fsspec.registry import get_filesystem_class

        get_filesystem_class(split_protocol(text)[0])
    except (ImportError, ValueError) as error:
        hint = f" Run `{install_command('s3')}`." if text.startswith("s3://") else ""
        raise CheckpointError(
            f"`checkpoint.folder` must be a path or a URL that fsspec can open, but is `{text}`: "
            f"{str(error).rstrip('.')}.{hint}"
        ) from None
    return folder


@contextmanager
def storage_errors_told(folder: Folder, must: str, *, remedy: str = "") -> Iterator[None]:
    """Convert any error in the context to a `CheckpointError` whose message names the cause. `must` says in the message
    what `folder` must be, for example "writable". `remedy` is the last sentence of the message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # object stores have exception classes of their own
        told = f"`{folder}` must be {must}, but is not: {reason(error)}. {remedy}"
        raise CheckpointError(told.rstrip()) from error


def reason(error: BaseException) -> str:
    """Describe the cause of an exception in one line without a final full stop. For an `OSError`, the line names the
    file.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (`{error.filename}`)" if error.filename else error.strerror
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
