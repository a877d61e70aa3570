"""Markers: the proof that Crosscut wrote a folder. The module `deletion` says how they are used."""

import errno
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crosscut.config.errors import ConfigError

MARKER_FILE = ".crosscut"
DRAFT = "draft"
"""Id in the marker of a temporary folder beside a folder that the user named, which is complete when it is renamed."""
MOST_BYTES = 4096
"""Maximum size of a marker."""

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

    def __reduce__(self) -> tuple[object, ...]:
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
        with opened(folder) as descriptor:
            return read_marker(descriptor)
    except OSError:
        return None


def read_marker(folder: int) -> Marker | None:
    """Read the marker of an open folder. Returns None if the folder has no valid marker."""
    try:
        with closing(os.open(MARKER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)) as file:
            return Marker.parse(os.read(file, MOST_BYTES)) if stat.S_ISREG(os.fstat(file).st_mode) else None
    except OSError:
        return None


def why_no_marker(found: Marker | None, holds: str = "") -> str:
    """Return why a folder without the right marker stays. `holds` is the name of something in the folder."""
    if found is None:
        return f"it has no marker `{MARKER_FILE}`{f' and holds `{holds}`' if holds else ''}"
    return f"its marker `{MARKER_FILE}` is that of another folder"


def why_strange(name: str) -> str:
    """Return why a folder stays that holds something else than Crosscut writes there."""
    return f"it holds `{name}`, which Crosscut did not write"


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open a folder, and yield its descriptor. Links up to the folder, and the folder itself, are followed."""
    with closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as descriptor:
        yield descriptor


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)
