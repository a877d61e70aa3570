"""Checkpoints of a run: their names, the list of checkpoints, the newest good checkpoint, and the removal of old
ones.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from crosscut.checkpoint.damage import find_damage
from crosscut.checkpoint.manifest import MANIFEST_FILE, Manifest, Progress, read_manifest
from crosscut.checkpoint.storage import (
    DRAFT_SUFFIX,
    DROPPED_SUFFIX,
    Folder,
    LocalFolder,
    folder_at,
    reason,
    storage_errors_told,
)
from crosscut.config import CheckpointError

PASSED_OVER_FILE = "passed-over.txt"
"""File in a damaged checkpoint that a run has skipped. A checkpoint with this file does not count as one of the
checkpoints to keep."""

_NAME = re.compile(r"step-(\d{8,})")

Location = str | Path | Folder
"""A path, an fsspec URL, or a `Folder`."""


@dataclass(frozen=True)
class GoodCheckpoint:
    """A checkpoint whose files all agree with its manifest."""

    folder: Folder
    manifest: Manifest
    skipped: tuple[str, ...] = ()
    """Damage of each newer checkpoint that was skipped."""
    passed_over: tuple[Folder, ...] = ()
    """Folders of the newer checkpoints that were skipped."""


def checkpoint_folder(root: Location, step: int) -> Folder:
    """Folder of the checkpoint after `step` optimizer steps."""
    return folder_at(root) / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step in the name of a checkpoint. None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def list_checkpoints(root: Location) -> list[Folder]:
    """All checkpoints under `root`, complete or damaged, in the order of their steps.

    On an object store, a folder without a manifest is an unfinished checkpoint and is not listed. Raises
    `CheckpointError` if the storage cannot be read.
    """
    folder = folder_at(root)
    with storage_errors_told(folder, "a folder that can be read"):
        steps = sorted((step, name) for name in folder.folders() if (step := step_of(name)) is not None)
        found = [folder / name for _, name in steps]
        return [c for c in found if isinstance(c, LocalFolder) or MANIFEST_FILE in c.files()]


def latest_good_checkpoint(root: Location) -> GoodCheckpoint:
    """The newest undamaged checkpoint, in which the size and hash of every file agree with the manifest.

    Newer checkpoints that are damaged are skipped and reported on the error stream. A bar is shown while large
    checkpoints are read. Only one process of a run should call this function, so that the files are not read once per
    rank. Raises `CheckpointError` if there is no checkpoint or if all checkpoints are damaged.
    """
    skipped: list[str] = []
    passed_over: list[Folder] = []
    for folder in reversed(list_checkpoints(root)):
        if not (damage := find_damage(folder, progress=True)):
            if skipped:
                click.echo(_fallback_message(skipped, folder), err=True)
            return GoodCheckpoint(folder, read_manifest(folder), tuple(skipped), tuple(passed_over))
        skipped.append("; ".join(damage))
        passed_over.append(folder)
    if skipped:
        listed = "\n".join(f"  {line}" for line in skipped)
        raise CheckpointError(
            f"`{folder_at(root)}` must hold an undamaged checkpoint, but all {len(skipped)} are damaged:\n{listed}\n"
            "To see which of them can be repaired, run `crosscut checkpoint repair --dry-run`."
        )
    raise CheckpointError(
        f"`{folder_at(root)}` must hold a checkpoint to resume from, but holds none. Start without --resume."
    )


def _fallback_message(skipped: list[str], folder: Folder) -> str:
    listed = "\n".join(f"  {line}" for line in skipped)
    noun = "A damaged checkpoint is" if len(skipped) == 1 else f"{len(skipped)} damaged checkpoints are"
    return f"crosscut: {noun} skipped:\n{listed}\ncrosscut: Continuing from `{folder}`, the newest good checkpoint."


def require_identity(
    checkpoint: Location, identity: Mapping[str, Any], *, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Progress:
    """Read the progress of a checkpoint whose identity agrees with `identity`.

    `defaults` are the values of settings that the checkpoint may lack, because it was written before they existed. A
    setting that stands in neither is not compared. Raises `CheckpointError` for the first setting that differs.
    """
    folder = folder_at(checkpoint)
    progress = read_manifest(folder).progress
    known = {**_as_json(defaults), **progress.identity}
    for name, wanted in _as_json(identity).items():
        saved = known.get(name, wanted)
        if saved != wanted:
            raise CheckpointError(
                f"`{name}` must be {saved!r} as in the checkpoint `{folder}`, but is {wanted!r}. Restore the old "
                "value, or start a new run."
            )
    return progress


def _as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as a manifest holds it: JSON turns tuples into lists."""
    values: dict[str, Any] = json.loads(json.dumps(dict(identity)))
    return values


def mark_passed_over(good: GoodCheckpoint) -> None:
    """Mark each damaged checkpoint newer than `good` as skipped, so that it does not count as one of the checkpoints to
    keep.

    The mark is a file in the checkpoint's folder, because the run may be restarted many times before `drop_old` reads
    the marks. Saving the same step again removes the mark. An error is only reported, because resuming does not depend
    on the mark.
    """
    for folder, damage in zip(good.passed_over, good.skipped, strict=True):
        try:
            folder.write(PASSED_OVER_FILE, f"{damage}\nThe run continued from {good.folder.name}.\n".encode())
        except Exception as error:  # object stores have exception classes of their own
            click.echo(
                f"crosscut: `{folder}` cannot be marked as damaged, so it counts as kept: {reason(error)}.", err=True
            )


def drop_old(root: Folder, *, newest: int, keep: int, keep_every: int) -> None:
    """Remove the checkpoints up to step `newest`, except the last `keep` and those at multiples of `keep_every`.

    Damaged checkpoints that were skipped do not count toward `keep`; they are removed together with the good
    checkpoints of the same age. Half-written and half-removed checkpoints of killed runs are also removed, so no
    checkpoint may be in progress under `root`. Checkpoints after step `newest` are kept. They come from a run that was
    later resumed from an earlier step, and the resumed run replaces them when it reaches their steps.
    """
    past = [c for c in list_checkpoints(root) if (step_of(c.name) or 0) <= newest]
    counted = [c for c in past if PASSED_OVER_FILE not in c.files()]
    for old in past[: past.index(counted[-keep])] if len(counted) >= keep else []:
        if not keep_every or (step_of(old.name) or 0) % keep_every:
            old.remove(MANIFEST_FILE)
    for name in root.folders():
        if is_left_over(name) or _is_unfinished(root / name, newest):
            (root / name).remove(MANIFEST_FILE)


def _is_unfinished(folder: Folder, newest: int) -> bool:
    """Whether a folder on an object store is an unfinished checkpoint up to step `newest`. On an object store, an
    unfinished checkpoint already has its final name.
    """
    step = step_of(folder.name)
    if isinstance(folder, LocalFolder) or step is None or step > newest:
        return False
    return MANIFEST_FILE not in folder.files()


def is_left_over(name: str) -> bool:
    """Whether a folder with this name is a half-written or half-removed checkpoint of a killed run."""
    return name.startswith(".step-") and name.endswith((DRAFT_SUFFIX, DROPPED_SUFFIX))
