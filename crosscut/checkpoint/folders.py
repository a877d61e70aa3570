"""The folders of a run's checkpoints and what each says of itself."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.config import CheckpointError, write_whole

PROGRESS_FILE = "progress.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run had come when a checkpoint was written."""

    step: int
    """Optimizer steps done; the next batch is that of this step."""
    samples: int
    """Sequences consumed: the data's cursor."""
    layout: str
    """The layout that wrote it, in words. Any layout may read it."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Settings by name that a run must share to go on from here, such as the model's sizes and the order of data."""


def checkpoint_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return root / f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """All whole checkpoints under `root`, oldest first."""
    return sorted(path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and _is_whole(path))


def _is_whole(folder: Path) -> bool:
    try:
        read_progress(folder)
    except CheckpointError:
        return False
    return True


def latest_checkpoint(root: Path) -> Path:
    """The newest whole checkpoint. Raises `CheckpointError` where there is none."""
    if not (found := list_checkpoints(root)):
        raise CheckpointError(
            f"`{root}` must hold a checkpoint to resume from, but holds none. Start without --resume."
        )
    return found[-1]


def write_progress(folder: Path, progress: Progress) -> None:
    """Write what the checkpoint says of itself."""
    write_whole(folder / PROGRESS_FILE, json.dumps(dataclasses.asdict(progress), indent=2) + "\n")


def read_progress(folder: Path) -> Progress:
    """Read what a checkpoint says of itself. Raises `CheckpointError` for a folder that is none or is damaged."""
    path = folder / PROGRESS_FILE
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"`{folder}` must be a checkpoint, but has no `{PROGRESS_FILE}`.") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`{path}` must tell a run's progress, but is damaged: {error}.") from None


def require_identity(folder: Path, identity: Mapping[str, Any]) -> Progress:
    """The progress of a checkpoint whose identity agrees with `identity` wherever both say something.

    Raises `CheckpointError` naming the first setting that differs.
    """
    progress = read_progress(folder)
    for name, wanted in identity.items():
        saved = progress.identity.get(name, wanted)
        if saved != wanted:
            raise CheckpointError(
                f"`{name}` must be {saved!r} as in the checkpoint `{folder}`, but is {wanted!r}. Leave it as "
                "it was, or start a new run."
            )
    return progress
