"""Repair a folder of checkpoints, but make only changes that cannot hide damage.

Half-written folders of killed runs are removed. A damaged checkpoint is renamed to `damaged-...`, so that nobody
mistakes it for a good checkpoint, and its data is not lost. A manifest is rebuilt only if all other files are
undamaged, that is, if every tensor can be read and passes its checksum. The new manifest records that a repair has
written it.
"""

import dataclasses
import time
from dataclasses import dataclass

from crosscut.checkpoint.damage import find_damage, sha256_of
from crosscut.checkpoint.folders import is_checkpoint_file, is_left_over, list_checkpoints, remove_checkpoint
from crosscut.checkpoint.format.index import INDEX_FILE
from crosscut.checkpoint.format.manifest import (
    FileEntry,
    Manifest,
    Progress,
    current_versions,
    dump_manifest,
    read_manifest,
    step_of,
)
from crosscut.checkpoint.saving.writer import tensor_entries
from crosscut.checkpoint.storage import Folder, LocalFolder, storage_errors_told
from crosscut.checkpoint.stored import StoredTensors
from crosscut.config import CheckpointError
from crosscut.config.conventions import MANIFEST_FILE

ASIDE = "damaged-"
_SECONDS_IN_USE = 600
"""A draft whose last change is less than this number of seconds ago may still belong to an active run."""


@dataclass(frozen=True)
class RepairAction:
    """One action that a repair has taken or, in a dry run, would take."""

    folder: str
    done: str
    """Kind of action: "remove" or "leave" a folder, "rebuild" a manifest, or "set aside" (rename) a damaged
    checkpoint."""
    why: str


def repair(root: Folder, *, dry_run: bool) -> list[RepairAction]:
    """Repair the checkpoints under `root`, and return the actions. With `dry_run`, only list the actions. No run may
    write to the folder during the repair.

    Raises `CheckpointError` if the storage cannot be read or written.
    """
    with storage_errors_told(root, "writable", remedy="Grant access, and start again."):
        actions = [_remove_left_over(root, name, dry_run) for name in root.folders() if is_left_over(name)]
        damaged = {c.name: damage for c in list_checkpoints(root) if (damage := find_damage(c, progress=True))}
        good = [c for c in list_checkpoints(root) if c.name not in damaged]
        for name, damage in damaged.items():
            done, why = _treat(root, name, damage, good, dry_run)
            actions.append(RepairAction(str(root / name), done, why))
        return actions


def _remove_left_over(root: Folder, name: str, dry_run: bool) -> RepairAction:
    folder = root / name
    if isinstance(folder, LocalFolder):
        newest = max(path.stat().st_mtime for path in (folder.path, *folder.path.iterdir()))
        if (age := time.time() - newest) < _SECONDS_IN_USE:
            return RepairAction(str(folder), "leave", f"it changed {age:.0f} s ago, so a run may be writing it")
    left = folder.why_kept(is_checkpoint_file) if dry_run else remove_checkpoint(folder)
    if left:
        return RepairAction(str(folder), "leave", left)
    return RepairAction(str(folder), "remove", "a run was stopped while it was writing or removing this folder")


def _treat(root: Folder, name: str, damage: list[str], good: list[Folder], dry_run: bool) -> tuple[str, str]:
    """Treat a damaged checkpoint. Returns the kind of action and the reason for it."""
    folder = root / name
    try:
        manifest = _rebuilt(folder, good)
    except CheckpointError as error:
        if foreign := _foreign(folder):
            return "leave", f"{foreign}; {' '.join(damage)}"
        aside = _free_name(root, f"{ASIDE}{name}")
        if not dry_run:
            root.rename(name, aside)
        return "set aside", f"as `{aside}`; {' '.join([*damage, str(error)])}"
    if not dry_run:
        folder.write(MANIFEST_FILE, dump_manifest(manifest))
    return "rebuild", (
        f"only the manifest was damaged: all {len(manifest.tensors)} tensors can be read and pass their checksums; "
        f"the facts about the run are copied from `{good[-1].name}`"
    )


def _foreign(folder: Folder) -> str:
    """Return why a damaged folder is not a checkpoint that somebody wrote with Crosscut. Empty if it may be one."""
    names = [*folder.folders(), *folder.files()]
    strange = next((name for name in names if not is_checkpoint_file(name)), None)
    return f"it holds `{strange}`, which no run writes to a checkpoint" if strange else ""


def _free_name(root: Folder, name: str) -> str:
    taken, number, free = root.folders(), 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _rebuilt(folder: Folder, good: list[Folder]) -> Manifest:
    """Build a new manifest for a checkpoint with a damaged manifest. Raises `CheckpointError` if other files are
    damaged, too, or if no good checkpoint can supply the facts about the run.
    """
    try:
        read_manifest(folder)
    except CheckpointError:
        pass
    else:
        raise CheckpointError("The manifest is undamaged, so the damage is in the files that the manifest lists.")
    if not good:
        raise CheckpointError(
            "There is no good checkpoint from which the run's config can be copied to a new manifest."
        )
    stored = StoredTensors(folder)
    if problems := list(stored.check()):
        raise CheckpointError(f"The tensors are also damaged: {'; '.join(problems)}.")
    neighbour = read_manifest(good[-1])
    sizes = folder.files()
    names = {*stored.index.files, *({INDEX_FILE} & sizes.keys())}
    placements = {name: entry.placement for name, entry in neighbour.tensors.items()}
    return Manifest(
        progress=_progress(step_of(folder.name) or 0, neighbour.progress),
        files={name: FileEntry(sizes[name], sha256_of(folder, name)) for name in sorted(names)},
        tensors=tensor_entries(stored.index, placements),
        values=tuple(sorted(stored.values)),
        versions=current_versions(),
        rebuilt=True,
    )


def _progress(step: int, neighbour: Progress) -> Progress:
    """Return the progress of a run at `step`, derived from `neighbour`, the progress of the same run at another step.
    The number of samples is computed as if every step had consumed the same number of samples.
    """
    per_step = neighbour.samples // neighbour.step if neighbour.step else 0
    return dataclasses.replace(neighbour, step=step, samples=per_step * step)
