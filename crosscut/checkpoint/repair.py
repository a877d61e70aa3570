"""Repair of a folder of checkpoints, limited to the damage that can honestly be repaired.

Folders that a killed run left half written are removed. A damaged checkpoint is moved aside, so that nothing takes it
for good and nothing is lost that could still be of use. Only where the manifest alone is damaged, and every tensor can
be read and passes its checksum, is a manifest written anew; the new manifest says that a repair wrote it.
"""

import dataclasses
import time
from dataclasses import dataclass

from crosscut.checkpoint.damage import find_damage, sha256_of
from crosscut.checkpoint.folders import is_left_over, list_checkpoints, step_of
from crosscut.checkpoint.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    Progress,
    current_versions,
    dump_manifest,
    read_manifest,
)
from crosscut.checkpoint.storage import Folder, LocalFolder, storage_errors_told
from crosscut.checkpoint.stored import METADATA_FILE, StoredTensors
from crosscut.checkpoint.writer import tensor_entries, value_names
from crosscut.config import CheckpointError

ASIDE = "damaged-"
_SECONDS_IN_USE = 600
"""A draft that changed so recently may be one that a run is writing."""


@dataclass(frozen=True)
class Action:
    """One thing that a repair did, or would do."""

    folder: str
    done: str
    """`remove`, `leave`, `rebuild` or `set aside`."""
    why: str


def repair(root: Folder, *, dry_run: bool) -> list[Action]:
    """Repair what lies under `root`; with `dry_run` only tell. No run may be writing there.

    Raises `CheckpointError` when the storage cannot be read or written.
    """
    with storage_errors_told(root, "writable"):
        actions = [_remove_left_over(root, name, dry_run) for name in root.folders() if is_left_over(name)]
        damaged = {c.name: damage for c in list_checkpoints(root) if (damage := find_damage(c, progress=True))}
        good = [c for c in list_checkpoints(root) if c.name not in damaged]
        for name, damage in damaged.items():
            actions.append(_treat(root, name, damage, good, dry_run))
        return actions


def _remove_left_over(root: Folder, name: str, dry_run: bool) -> Action:
    folder = root / name
    if isinstance(folder, LocalFolder):
        newest = max(path.stat().st_mtime for path in (folder.path, *folder.path.iterdir()))
        if (age := time.time() - newest) < _SECONDS_IN_USE:
            return Action(str(folder), "leave", f"it changed {age:.0f} s ago, so a run may be writing it")
    if not dry_run:
        folder.remove(MANIFEST_FILE)
    return Action(str(folder), "remove", "a run that was stopped left it half written or half removed")


def _treat(root: Folder, name: str, damage: list[str], good: list[Folder], dry_run: bool) -> Action:
    folder = root / name
    try:
        manifest = _rebuilt(folder, good)
    except CheckpointError as error:
        aside = _free_name(root, f"{ASIDE}{name}")
        if not dry_run:
            root.rename(name, aside)
        return Action(str(folder), "set aside", f"as `{aside}`; {' '.join([*damage, str(error)])}")
    if not dry_run:
        folder.write(MANIFEST_FILE, dump_manifest(manifest))
    return Action(
        str(folder),
        "rebuild",
        f"its manifest was damaged, but all {len(manifest.tensors)} tensors can be read and pass their checksums; "
        f"what it says of its run is taken from `{good[-1].name}`",
    )


def _free_name(root: Folder, name: str) -> str:
    taken, number, free = root.folders(), 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _rebuilt(folder: Folder, good: list[Folder]) -> Manifest:
    """A new manifest for a checkpoint whose own is damaged. Raises `CheckpointError` where that cannot be honest."""
    try:
        read_manifest(folder)
    except CheckpointError:
        pass
    else:
        raise CheckpointError("Its manifest is whole, so what it lists is what is damaged.")
    if not good:
        raise CheckpointError("No good checkpoint is beside it to tell which run it is of.")
    try:
        stored = StoredTensors(folder)
        problems = list(stored.check())
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"Its `{METADATA_FILE}` cannot be read: {error}.") from None
    if problems:
        raise CheckpointError(f"Its tensors are damaged, too: {'; '.join(problems)}.")
    neighbour = read_manifest(good[-1])
    names = {METADATA_FILE, *(place.relative_path for place in stored.metadata.storage_data.values())}
    sizes = folder.files()
    placements = {name: entry.placement for name, entry in neighbour.tensors.items()}
    return Manifest(
        progress=_progress(step_of(folder.name) or 0, neighbour.progress),
        files={name: FileEntry(sizes[name], sha256_of(folder, name)) for name in sorted(names)},
        tensors=tensor_entries(stored.metadata, placements),
        values=value_names(stored.metadata),
        versions=current_versions(),
        rebuilt=True,
    )


def _progress(step: int, neighbour: Progress) -> Progress:
    """Progress of the neighbour's run at another step; every step takes the same number of samples."""
    per_step = neighbour.samples // neighbour.step if neighbour.step else 0
    return dataclasses.replace(neighbour, step=step, samples=per_step * step)
