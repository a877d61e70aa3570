"""Storage of checkpoints: a folder of this machine's file systems, or of any object store that fsspec knows.

The two differ in how a folder becomes whole at one instant. A file system renames: a checkpoint is written under a
hidden name beside, every file and folder is flushed to the disk, and the rename is the instant. An object store has no
rename: files are written under their final names, and the last one, the manifest, is the instant. `begin`, `publish`
and `remove` hide the difference; nothing else in this room knows of it.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from crosscut.config import CheckpointError

DRAFT_SUFFIX = ".partial"
"""Suffix of the hidden folder in which a checkpoint is written until it is whole."""
DROPPED_SUFFIX = ".dropped"
"""Suffix of the hidden folder that a checkpoint is renamed to before its files are removed."""


_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "oss", "oci"})
"""Stores whose folders are parts of names: making one could only make a bucket, by the name of a typing mistake."""


class Folder(ABC):
    """A folder, by its path or URL. A small value that can be sent to other processes."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path."""

    @abstractmethod
    def __truediv__(self, name: str) -> Self:
        """The folder of that name in it."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """The bytes of each file that lies directly in it, by name; empty where there is no such folder."""

    @abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders directly in it, sorted; empty where there is no such folder."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file of it for reading."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file of it for writing; it is safely stored once the context has ended without an error."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Give a file or a folder in it another name."""

    @abstractmethod
    def draft(self) -> Self:
        """Path at which this folder is written until `publish`."""

    @abstractmethod
    def begin(self, last: str) -> None:
        """Make this folder an empty draft. `last` is the file whose presence makes an object store's folder whole."""

    @abstractmethod
    def publish(self, draft: Self, last: str) -> None:
        """Put the whole draft in this folder's place, at one instant."""

    @abstractmethod
    def remove(self, last: str) -> None:
        """Remove it with all that it holds; `last` is the first to go, so that no part passes for the whole."""

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        with self.open(name) as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, safely stored on return."""
        with self.create(name) as file:
            file.write(content)


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A folder of a file system that can rename."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def __truediv__(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def files(self) -> dict[str, int]:
        """The bytes of each file, by name."""
        return {path.name: path.stat().st_size for path in self._entries() if path.is_file()}

    def folders(self) -> list[str]:
        """The names of the folders."""
        return [path.name for path in self._entries() if path.is_dir()]

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading."""
        return (self.path / name).open("rb")

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing; flushed to the disk when the context ends."""
        with (self.path / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder, and flush the change."""
        (self.path / old).rename(self.path / new)
        _flush_folder(self.path)

    def draft(self) -> "LocalFolder":
        """The hidden folder beside."""
        return LocalFolder(self.path.with_name(f".{self.name}{DRAFT_SUFFIX}"))

    def begin(self, last: str) -> None:  # noqa: ARG002 - a rename needs no last file
        """Remove what a killed run left, and make the folder."""
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True)

    def publish(self, draft: "LocalFolder", last: str) -> None:
        """Rename the draft; a folder that has this name goes first."""
        _flush_folder(draft.path)
        if self.path.exists():
            self.remove(last)
        draft.path.rename(self.path)
        _flush_folder(self.path.parent)
        _flush_folder(self.path.parent.parent)  # the folder of all checkpoints may be new

    def remove(self, last: str) -> None:  # noqa: ARG002 - see `begin`
        """Rename it to a hidden name and remove that, so that no part of it is ever seen under its name."""
        if self.name.startswith("."):  # hidden already
            shutil.rmtree(self.path)
            return
        dropped = self.path.with_name(f".{self.name}{DROPPED_SUFFIX}")
        if dropped.exists():
            shutil.rmtree(dropped)
        self.path.rename(dropped)
        shutil.rmtree(dropped)


def _flush_folder(path: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ObjectFolder(Folder):
    """A folder of an object store; its options and credentials come from fsspec's own configuration."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def __truediv__(self, name: str) -> "ObjectFolder":
        return ObjectFolder(f"{self.url}/{name}")

    def _store(self) -> tuple[Any, str]:
        """The file system of fsspec, which keeps one for each configuration, and the path in it."""
        from fsspec.core import url_to_fs

        store, path = url_to_fs(self.url)
        store.invalidate_cache()  # other processes write, too
        return store, path

    def _entries(self, kind: str) -> dict[str, int]:
        store, path = self._store()
        try:
            entries = store.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        found = {str(e["name"]).rstrip("/").rpartition("/")[2]: e for e in entries if e["name"].rstrip("/") != path}
        return {name: int(entry["size"] or 0) for name, entry in sorted(found.items()) if entry["type"] == kind}

    def files(self) -> dict[str, int]:
        """The bytes of each object, by name."""
        return self._entries("file")

    def folders(self) -> list[str]:
        """The prefixes under this one."""
        return list(self._entries("directory"))

    def open(self, name: str) -> IO[bytes]:
        """Open an object for reading."""
        store, path = self._store()
        file: IO[bytes] = store.open(f"{path}/{name}", "rb")
        return file

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open an object for writing; it is there when the context has ended."""
        store, path = self._store()
        file = store.open(f"{path}/{name}", "wb")
        try:
            yield file
        except BaseException:
            file.discard()  # closing would store what was written so far as if it were all
            raise
        file.close()

    def rename(self, old: str, new: str) -> None:
        """Copy and remove, which is what such stores have for it."""
        store, path = self._store()
        store.mv(f"{path}/{old}", f"{path}/{new}", recursive=old in self.folders())

    def draft(self) -> "ObjectFolder":
        """The folder itself: it counts for nothing until its last file is there."""
        return self

    def begin(self, last: str) -> None:
        """Remove what is there."""
        self.remove(last)
        store, path = self._store()
        if not _BUCKETS.intersection([store.protocol] if isinstance(store.protocol, str) else store.protocol):
            store.makedirs(path, exist_ok=True)

    def publish(self, draft: "ObjectFolder", last: str) -> None:
        """Nothing is left to do: the last file is there."""

    def remove(self, last: str) -> None:
        """Remove the file that makes it whole, then the rest."""
        store, path = self._store()
        names = self.files()
        for name in sorted(names, key=lambda name: name != last):
            store.rm_file(f"{path}/{name}")
        if store.exists(path):  # where folders are more than a part of names
            store.rm(path, recursive=True)


def folder_at(location: "str | Path | Folder") -> Folder:
    """The folder that a path or an fsspec URL such as `s3://bucket/run` names.

    Raises `CheckpointError` for a URL of a kind that fsspec does not know or that a package is missing for.
    """
    if isinstance(location, Folder):
        return location
    text = str(location).removeprefix("file://")
    if isinstance(location, Path) or "://" not in text:
        return LocalFolder(Path(text))
    folder = ObjectFolder(text.rstrip("/"))
    try:
        from fsspec.core import split_protocol
        from fsspec.registry import get_filesystem_class

        get_filesystem_class(split_protocol(text)[0])
    except (ImportError, ValueError) as error:
        hint = " Try `pip install crosscut[s3]`." if text.startswith("s3://") else ""
        raise CheckpointError(
            f"`checkpoint.folder` must be a path or a URL that fsspec can open, but is `{text}`: "
            f"{str(error).rstrip('.')}.{hint}"
        ) from None
    return folder


@contextmanager
def storage_errors_told(folder: Folder, must: str) -> Iterator[None]:
    """Turn what a storage raises into a `CheckpointError` that says what `folder` must be (`must`) and what is so."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # object stores have exception classes of their own
        raise CheckpointError(f"`{folder}` must be {must}, but is not: {reason(error)}.") from error


def reason(error: BaseException) -> str:
    """One line of what an exception says, without its full stop; of one that came of a storage's, what that one says.

    PyTorch's writer stumbles over its own position once a write has failed.
    """
    error = _from_storage(error) or error
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (`{error.filename}`)" if error.filename else error.strerror
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _from_storage(error: BaseException | None) -> OSError | None:
    """The first error of the operating system among those that led to an exception."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
