"""Removal and renaming of folders in an object store. The rules are those of the module `deletion`."""

import errno
import os
import secrets
from typing import TYPE_CHECKING

from crosscut.config.system.markers import MARKER_FILE, MOST_BYTES, Marker, Names, told, why_no_marker, why_strange

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_REMOVE = "aws s3 rm --recursive"
"""Command that removes a folder of the most common object store."""


class Prefix:
    """Folder of an object store (`store`, of fsspec) in which the run makes and removes folders. The same rules hold as
    on a disk, with an object in place of the marker file.
    """

    def __init__(self, store: "AbstractFileSystem", root: str) -> None:
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
            return Marker.parse(self.store.cat_file(f"{path}/{MARKER_FILE}", end=MOST_BYTES))
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
            return told(shown, why_no_marker(found), remove=_REMOVE)
        strange = [one for one in objects if one != MARKER_FILE and not only(one)]
        return told(shown, why_strange(strange[0]), remove=_REMOVE) if strange else ""

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
