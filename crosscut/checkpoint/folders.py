"""The checkpoints of a run: their names, which are there, which is the newest good one, which are kept."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
"""In a damaged checkpoint that a run has gone on without: it is not one of those that are kept."""

_NAME = re.compile(r"step-(\d{8,})")

Location = str | Path | Folder
"""A path, an fsspec URL, or what `folder_at` made of one."""


@dataclass(frozen=True)
class GoodCheckpoint:
    """A checkpoint whose every file has been compared with its manifest."""

    folder: Folder
    manifest: Manifest
    skipped: tuple[str, ...] = ()
    """Damage of each newer checkpoint that was passed over."""
    passed_over: tuple[Folder, ...] = ()
    """Folders of the newer checkpoints that were passed over."""


def checkpoint_folder(root: Location, step: int) -> Folder:
    """The folder of the checkpoint after `step` steps."""
    return folder_at(root) / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None for another name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def list_checkpoints(root: Location) -> list[Folder]:
    """All checkpoints under `root`, oldest first, whole or damaged.

    On an object store a folder without a manifest is one that was never finished, and is not listed. Raises
    `CheckpointError` when the storage cannot be read.
    """
    folder = folder_at(root)
    with storage_errors_told(folder, "a folder that can be read"):
        steps = sorted((step, name) for name in folder.folders() if (step := step_of(name)) is not None)
        found = [folder / name for _, name in steps]
        return [c for c in found if isinstance(c, LocalFolder) or MANIFEST_FILE in c.files()]


def latest_good_checkpoint(root: Location) -> GoodCheckpoint:
    """The newest checkpoint that is as it was written: every file's size and hash agree with its manifest.

    Says on the error stream which newer ones are damaged and passed over, and how, and shows a bar while large ones
    are read. For one process of a run to call: the others need not read it all again. Raises `CheckpointError` where
    there is none, or when all are damaged.
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
            f"`{folder_at(root)}` must hold a whole checkpoint, but all {len(skipped)} are damaged:\n{listed}\n"
            "See what can be saved with `crosscut checkpoint repair --dry-run`."
        )
    raise CheckpointError(
        f"`{folder_at(root)}` must hold a checkpoint to resume from, but holds none. Start without --resume."
    )


def _fallback_message(skipped: list[str], folder: Folder) -> str:
    listed = "\n".join(f"  {line}" for line in skipped)
    noun = "A damaged checkpoint is" if len(skipped) == 1 else f"{len(skipped)} damaged checkpoints are"
    return f"crosscut: {noun} passed over:\n{listed}\ncrosscut: Going on from `{folder}`, the newest good one."


def require_identity(checkpoint: Location, identity: Mapping[str, Any]) -> Progress:
    """The progress of a checkpoint whose identity agrees with `identity` wherever both say something.

    Raises `CheckpointError` naming the first setting that differs.
    """
    folder = folder_at(checkpoint)
    progress = read_manifest(folder).progress
    for name, wanted in json.loads(json.dumps(dict(identity))).items():  # a manifest holds lists, and no tuples
        saved = progress.identity.get(name, wanted)
        if saved != wanted:
            raise CheckpointError(
                f"`{name}` must be {saved!r} as in the checkpoint `{folder}`, but is {wanted!r}. Leave it as "
                "it was, or start a new run."
            )
    return progress


def mark_passed_over(good: GoodCheckpoint) -> None:
    """Note in each damaged checkpoint newer than `good` that a run goes on without it, so that it counts as none kept.

    The note is a file, since the run may be started again many times before `drop_old` comes to it; saving that step
    again removes it with the rest. What cannot be noted is told: to resume does not depend on it.
    """
    for folder, damage in zip(good.passed_over, good.skipped, strict=True):
        try:
            folder.write(PASSED_OVER_FILE, f"{damage}\nThe run went on from {good.folder.name}.\n".encode())
        except Exception as error:  # object stores have exception classes of their own
            click.echo(f"crosscut: `{folder}` counts as kept, since no note could be left: {reason(error)}.", err=True)


def drop_old(root: Folder, *, newest: int, keep: int, keep_every: int) -> None:
    """Remove the checkpoints up to step `newest` but the last `keep` and those at multiples of `keep_every`.

    Damaged ones that were passed over do not count among the `keep`, and go when the good ones of their age do. What
    killed runs left half written or half removed goes, too; so nothing may be in writing under `root`. Later ones
    stay: they are of a run that was taken up again from an earlier step, and are replaced when it gets there.
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
    """Whether it is a part of a checkpoint up to step `newest` on an object store, where parts have its final name."""
    step = step_of(folder.name)
    if isinstance(folder, LocalFolder) or step is None or step > newest:
        return False
    return MANIFEST_FILE not in folder.files()


def is_left_over(name: str) -> bool:
    """Whether a folder of this name is one that a killed run has not finished writing or removing."""
    return name.startswith(".step-") and name.endswith((DRAFT_SUFFIX, DROPPED_SUFFIX))
