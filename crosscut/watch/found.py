"""Runs at the places that a user names: folders of runs, patterns of them, and folders that hold runs."""

from __future__ import annotations

import glob
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from crosscut.config import ConfigError
from crosscut.watch.source import Source, is_run
from crosscut.watch.told import ToldRun

_DEPTH = 3
"""Number of folders between a place and a run in it."""

_MOST = 500
"""Maximum number of runs that are shown."""

_SECONDS_BETWEEN = 2.0
"""Time between two searches for new runs."""


class Runs:
    """Runs at some places. New runs appear with `refresh`, and a run whose folder disappears stays in the list."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self.num_left_out = 0
        """Number of runs that are not shown because there are too many."""
        self._runs: dict[Path, ToldRun] = {}
        self._searched = -_SECONDS_BETWEEN

    def require_any(self) -> None:
        """Raise `ConfigError` if a place is neither a folder nor a pattern that fits to one."""
        for place in self._places:
            if not _folders_at(place):
                raise ConfigError(
                    f"`{place}` must be the folder of a run, a folder that holds runs, or a pattern of folders, but no "
                    "folder is found there. Name the run's `output.folder`."
                )

    def refresh(self) -> list[ToldRun]:
        """Search for new runs, and return all runs, sorted by their folders."""
        if time.monotonic() - self._searched >= _SECONDS_BETWEEN:
            self._search()
            self._searched = time.monotonic()
        return list(self._runs.values())

    def listed(self) -> dict[str, object]:
        """Return the list of the runs, as the page shows it."""
        return {"runs": [run.listed() for run in self._runs.values()], "left_out": self.num_left_out}

    def _search(self) -> None:
        found = [run for place in self._places for folder in _folders_at(place) for run in _runs_in(folder, _DEPTH)]
        new = [folder for folder in dict.fromkeys(found) if folder not in self._runs]
        taken = new[: _MOST - len(self._runs)]
        self.num_left_out = len(new) - len(taken)
        if not taken:
            return
        for folder in taken:
            self._runs[folder] = ToldRun(_id(folder), folder.name, Source(folder))
        self._runs = dict(sorted(self._runs.items(), key=lambda entry: _natural(entry[0])))
        for folder, name in zip(self._runs, _names(list(self._runs)), strict=True):
            self._runs[folder].name = name


def _folders_at(place: str) -> list[Path]:
    """Return the folders that a place names. A folder whose name has the signs of a pattern is taken as it is."""
    paths = [place] if Path(place).is_dir() else glob.glob(place)  # noqa: PTH207 (any path)
    return [Path(os.path.abspath(path)) for path in sorted(paths) if Path(path).is_dir()]  # noqa: PTH100 (links stay)


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yield `folder` if it is a run, or else the runs in it. Links are not followed, so that no circle is entered."""
    if is_run(folder):
        yield folder
    elif depth:
        try:
            inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=depth == _DEPTH))
        except OSError:
            return
        for name in inner:
            if not name.startswith("."):
                yield from _runs_in(folder / name, depth - 1)


def _id(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def _natural(folder: Path) -> list[tuple[int, str]]:
    """Key that sorts `run-9` before `run-10`."""
    return [(int(part) if part.isdigit() and part.isascii() else -1, part) for part in _split(str(folder))]


def _split(text: str) -> list[str]:
    parts, digits = [""], False
    for sign in text:
        if (sign.isascii() and sign.isdigit()) != digits:
            parts, digits = [*parts, ""], not digits
        parts[-1] += sign
    return parts


def _names(folders: list[Path]) -> list[str]:
    """Names of runs: the ends of their paths, as long as they must be to differ."""
    for num_parts in range(1, 20):
        names = ["/".join(folder.parts[-num_parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return [name.encode("utf-8", "backslashreplace").decode() for name in names]
