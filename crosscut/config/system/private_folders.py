"""Check that the folders of a run in memory are safe from other users."""

import os
import stat
from contextlib import suppress
from pathlib import Path


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
