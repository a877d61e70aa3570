"""Name a run's checkpoints, list them, find the newest undamaged one, and remove old ones."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crosscut.checkpoint.damage import find_damage
from crosscut.checkpoint.format.index import INDEX_FILE
from crosscut.checkpoint.format.manifest import Manifest, Progress, read_manifest, step_of
from crosscut.checkpoint.storage import (
    DRAFT_SUFFIX,
    DROPPED_SUFFIX,
    Folder,
    LocalFolder,
    folder_at,
    reason,
    storage_errors_told,
)
from crosscut.config import CheckpointError, DamagedCheckpointError
from crosscut.config.conventions import MANIFEST_FILE
from crosscut.config.system.terminal import echo

PASSED_OVER_FILE = "passed-over.txt"
"""Name of the file that marks a damaged checkpoint as skipped by a run. A checkpoint with this file does not count
toward `checkpoint.keep`."""

_FILES = frozenset({MANIFEST_FILE, INDEX_FILE, PASSED_OVER_FILE})
_DATA = re.compile(r"rank-[0-9]+\.safetensors|__[0-9]+_[0-9]+\.distcp")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}")
"""Form of the name under which a file is written before it replaces another one."""

Location = str | Path | Folder
"""A path, an fsspec URL, or a `Folder`."""


@dataclass(frozen=True)
class GoodCheckpoint:
    """An undamaged checkpoint: every file has the size and hash that the manifest gives."""

    folder: Folder
    manifest: Manifest
    skipped: tuple[str, ...] = ()
    """Damage in the newer checkpoints that were skipped: one description per checkpoint, newest first."""
    passed_over: tuple[Folder, ...] = ()
    """Folders of the skipped checkpoints, in the order of `skipped`."""


def checkpoint_folder(root: Location, step: int) -> Folder:
    """Return the folder under `root` for the checkpoint after `step` optimizer steps."""
    return folder_at(root) / f"step-{step:08d}"


def is_checkpoint_file(name: str) -> bool:
    """Whether a run writes a file of this name to the folder of a checkpoint."""
    found = _TEMPORARY.fullmatch(name)
    name = found[1] if found else name
    return name in _FILES or _DATA.fullmatch(name) is not None


def remove_checkpoint(folder: Folder) -> str:
    """Remove a checkpoint that the run wrote. Returns an empty text, or the sentence that says why the folder stays."""
    return folder.remove(MANIFEST_FILE, is_checkpoint_file)


def require_replaceable(root: Location, *, after: int) -> None:
    """Check that the run can write its checkpoints after step `after`.

    Raises `CheckpointError` if the folder of such a checkpoint, or its draft, is there but may not be removed, because
    it has no marker. Otherwise, the run would fail when it reaches the step.
    """
    folder = folder_at(root)
    with storage_errors_told(folder, "a folder that can be read"):
        later = (name for name in folder.folders() if (_step_of_any(name) or 0) > after)
        left = [told for name in later if (told := (folder / name).why_kept(is_checkpoint_file))]
    if left:
        raise CheckpointError("The run must be able to replace the checkpoints of later steps. " + " ".join(left))


def _step_of_any(name: str) -> int | None:
    """Step of a checkpoint, or of a draft that `is_left_over`, by the name of its folder."""
    return step_of(name[1:].partition(".")[0]) if is_left_over(name) else step_of(name)


def list_checkpoints(root: Location) -> list[Folder]:
    """Return all checkpoints under `root`, whether intact or damaged, in ascending order of step.

    On an object store, a folder without a manifest is an unfinished checkpoint and is not listed. Raises
    `CheckpointError` if the storage cannot be read.
    """
    folder = folder_at(root)
    with storage_errors_told(folder, "a folder that can be read"):
        steps = sorted((step, name) for name in folder.folders() if (step := step_of(name)) is not None)
        found = [folder / name for _, name in steps]
        return [c for c in found if isinstance(c, LocalFolder) or MANIFEST_FILE in c.files()]


def latest_good_checkpoint(root: Location) -> GoodCheckpoint:
    """Find the newest checkpoint under `root` whose files all have the size and hash given in its manifest.

    Newer checkpoints that are damaged are skipped and reported on the error stream. A progress bar is shown while a
    large checkpoint is read. Only one process of a run should call this function, because the call reads all files of a
    checkpoint. Raises `CheckpointError` if there is no checkpoint, and `DamagedCheckpointError` if all checkpoints are
    damaged.
    """
    skipped: list[str] = []
    passed_over: list[Folder] = []
    for folder in reversed(list_checkpoints(root)):
        if not (damage := find_damage(folder, progress=True)):
            if skipped:
                echo(_fallback_message(skipped, folder), err=True)
            return GoodCheckpoint(folder, read_manifest(folder), tuple(skipped), tuple(passed_over))
        skipped.append("; ".join(damage))
        passed_over.append(folder)
    if skipped:
        listed = "\n".join(f"  {line}" for line in skipped)
        raise DamagedCheckpointError(
            f"`{folder_at(root)}` must hold an undamaged checkpoint, but every checkpoint is damaged:\n{listed}\n"
            f"To see which checkpoints can be repaired, run `crosscut checkpoint repair --dry-run {folder_at(root)}`."
        )
    raise CheckpointError(
        f"`{folder_at(root)}` must hold a checkpoint, but holds none. Choose another folder, or start a new run "
        "without --resume."
    )


def _fallback_message(skipped: list[str], folder: Folder) -> str:
    listed = "\n".join(f"  {line}" for line in skipped)
    noun = "A damaged checkpoint is" if len(skipped) == 1 else f"{len(skipped)} damaged checkpoints are"
    return f"crosscut: {noun} skipped:\n{listed}\ncrosscut: Continuing from `{folder}`, the newest good checkpoint."


def require_identity(checkpoint: Location, identity: Mapping[str, object]) -> Progress:
    """Read the progress of a checkpoint, and check that a run with the settings `identity` may resume from this
    checkpoint.

    A setting that the checkpoint does not hold is not compared. Raises `CheckpointError` for the first setting that
    differs.
    """
    folder = folder_at(checkpoint)
    progress = read_manifest(folder).progress
    for name, wanted in json.loads(json.dumps(dict(identity))).items():  # JSON turns tuples into lists
        saved = progress.identity.get(name, wanted)
        if saved != wanted:
            raise CheckpointError(
                f"`{name}` must be {saved!r} as in the checkpoint `{folder}`, but is {wanted!r}. Restore the old "
                "value, or start a new run."
            )
    return progress


def mark_passed_over(good: GoodCheckpoint) -> None:
    """Mark each damaged checkpoint that is newer than `good`, so that `drop_old` does not count it toward `keep`.

    The mark is a file in the checkpoint's folder, so the mark outlasts restarts of the run. Saving the same step again
    removes the mark. If a mark cannot be written, a warning is printed and no error is raised, because resuming does
    not depend on the mark.
    """
    for folder, damage in zip(good.passed_over, good.skipped, strict=True):
        try:
            folder.write(PASSED_OVER_FILE, f"{damage}\nThe run continued from {good.folder.name}.\n".encode())
        except Exception as error:  # object stores have exception classes of their own
            echo(
                f"crosscut: `{folder}` cannot be marked as damaged, so `checkpoint.keep` counts this checkpoint as "
                f"good: {reason(error)}. Move the folder elsewhere.",
                err=True,
            )


def drop_old(root: Folder, *, newest: int, keep: int, keep_every: int, spared: int | None = None) -> list[str]:
    """Remove all checkpoints up to step `newest`, except the last `keep` checkpoints, the checkpoint of step `spared`
    and, unless `keep_every` is 0, the checkpoints whose step is a multiple of `keep_every`.

    Damaged checkpoints that were skipped do not count toward `keep`. These checkpoints are removed together with good
    checkpoints of the same age. Checkpoints that killed runs left half-written or half-removed are also removed, so no
    process may be writing a checkpoint under `root`. Checkpoints after step `newest` are kept. They exist if a run was
    resumed from an earlier step. The resumed run replaces each one when it reaches the same step.

    Returns a sentence for each folder that stays because Crosscut cannot prove that it wrote the folder.
    """
    past = [c for c in list_checkpoints(root) if (step_of(c.name) or 0) <= newest]
    counted = [c for c in past if PASSED_OVER_FILE not in c.files()]
    dropped = []
    for old in past[: past.index(counted[-keep])] if len(counted) >= keep else []:
        step = step_of(old.name) or 0
        if step != spared and (not keep_every or step % keep_every):
            dropped.append(old)
    dropped += [root / name for name in root.folders() if is_left_over(name) or _is_unfinished(root / name, newest)]
    return [left for folder in dropped if (left := remove_checkpoint(folder))]


def _is_unfinished(folder: Folder, newest: int) -> bool:
    """Whether `folder` is on an object store and holds an unfinished checkpoint of a step up to `newest`. On an object
    store, even an unfinished checkpoint has its final name.
    """
    step = step_of(folder.name)
    if isinstance(folder, LocalFolder) or step is None or step > newest:
        return False
    return MANIFEST_FILE not in folder.files()


def is_left_over(name: str) -> bool:
    """Whether a folder with this name is a half-written or half-removed checkpoint of a killed run."""
    return name.startswith(".step-") and name.endswith((DRAFT_SUFFIX, DROPPED_SUFFIX))
