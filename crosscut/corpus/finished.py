"""What a finished run says of its stages, for those who read its `work` folder later: a run that adds to it, the audit.

The file is removed when a run begins and written when it has ended well. So a `work` folder that has one is whole, and
its stages' folders are those of that run and no others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from crosscut.config.files import write_whole

WORK_FOLDER = "work"
"""The stages' files, in a corpus's folder."""

FINISHED_FILE = "line.json"

LOCK_FILE = ".lock"
"""In a corpus's folder: held alone by the run that prepares it, and together by those that add to it."""


@dataclass(frozen=True)
class FinishedRun:
    """The stages of a run, as far as others must know them."""

    filters: tuple[str, ...]
    """Those that drop documents, in their order."""

    cleaned: bool
    """Whether texts are those of the stage `cleaning`."""

    def write(self, work: Path) -> None:
        """Say that the run has ended well."""
        write_whole(work / FINISHED_FILE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, work: Path) -> FinishedRun | None:
        """What the run in this `work` folder was; None where it has not ended well, or there was none."""
        try:
            table = json.loads((work / FINISHED_FILE).read_text(encoding="utf-8"))
            return cls(tuple(table["filters"]), bool(table["cleaned"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def mark_unfinished(work: Path) -> None:
    """Say that a run has begun."""
    (work / FINISHED_FILE).unlink(missing_ok=True)
