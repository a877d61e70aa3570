"""Find checkpoints by path or URL, and describe or verify one checkpoint, for the command `crosscut checkpoint`."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosscut.checkpoint.damage import find_damage
from crosscut.checkpoint.folders import is_left_over, list_checkpoints
from crosscut.checkpoint.format.index import DTYPES_BY_NAME
from crosscut.checkpoint.format.manifest import Manifest, holds_average, read_manifest, step_of
from crosscut.checkpoint.maintenance.repair import ASIDE
from crosscut.checkpoint.storage import Folder, folder_at
from crosscut.config import CheckpointError, load_run
from crosscut.config.conventions import CHECKPOINTS_FOLDER, CONFIG_FILE, MANIFEST_FILE


def root_of(location: str) -> Folder:
    """Return the folder that holds the checkpoints of a run. `location` is the path of the run's folder, or the path or
    URL of the folder of checkpoints itself.
    """
    folder = folder_at(location)
    config = Path(location) / CONFIG_FILE
    if "://" not in location and config.is_file():
        elsewhere = load_run(config).checkpoint.folder
        return folder_at(elsewhere) if elsewhere else folder / CHECKPOINTS_FOLDER
    return folder


def checkpoints_at(location: str) -> list[Folder]:
    """List the checkpoints at a path or URL: one checkpoint if `location` is a checkpoint, or all checkpoints of a run
    in the order of their steps.

    Raises `CheckpointError` if there is no checkpoint.
    """
    folder = folder_at(location)
    if step_of(folder.name) is not None or MANIFEST_FILE in folder.files():
        return [folder]
    if not (found := list_checkpoints(root_of(location))):
        raise CheckpointError(
            f"`{location}` must be a checkpoint or a run's folder with checkpoints, but holds no checkpoint. Pass a "
            "folder such as `runs/demo` or `runs/demo/checkpoints/step-00000580`."
        )
    return found


def folder_to_repair(location: str) -> Folder:
    """Return the folder of checkpoints for a location, as `root_of` does, after checking that the folder holds
    checkpoints.

    Raises `CheckpointError` if the folder holds no checkpoint, not even a half-written or damaged one. Also raises
    `CheckpointError` if the location is a single checkpoint, because a repair needs the run's other checkpoints.
    """
    folder, root = folder_at(location), root_of(location)
    if step_of(folder.name) is not None or MANIFEST_FILE in folder.files():
        raise CheckpointError(
            f"`{location}` must be a run's folder or a folder of checkpoints, but is one checkpoint. Pass the folder "
            "that contains this checkpoint."
        )
    if not any(step_of(name) is not None or is_left_over(name) or name.startswith(ASIDE) for name in root.folders()):
        raise CheckpointError(
            f"`{location}` must be a run's folder or a folder of checkpoints, but holds no checkpoint. Check the path."
        )
    return root


def describe(folder: Folder) -> dict[str, Any]:
    """Return the contents of a checkpoint's manifest as a JSON-compatible dictionary, with the size of each tensor in
    bytes. Only the manifest is read.
    """
    manifest = read_manifest(folder)
    return {
        "folder": str(folder),
        **asdict(manifest.progress),
        "versions": manifest.versions,
        "rebuilt": manifest.rebuilt,
        "averaged_weights": holds_average(manifest),
        "bytes": manifest.num_bytes,
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
        "tensors": {
            name: {**asdict(entry), "shape": list(entry.shape), "bytes": _bytes(manifest, name)}
            for name, entry in manifest.tensors.items()
        },
        "values": list(manifest.values),
    }


def _bytes(manifest: Manifest, name: str) -> int:
    entry = manifest.tensors[name]
    dtype = DTYPES_BY_NAME.get(entry.dtype)
    return 0 if dtype is None else math.prod(entry.shape) * dtype.itemsize


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a checkpoint's files with its manifest."""

    folder: str
    damage: list[str]
    """One message per damaged file. Empty for an undamaged checkpoint."""
    num_bytes: int
    seconds: float


def verify(folder: Folder, *, progress: bool) -> Verdict:
    """Compare every file of a checkpoint with the size and hash in the manifest. If `progress` is true, a progress bar
    is shown for a large checkpoint.
    """
    start = time.perf_counter()
    damage = find_damage(folder, progress=progress)
    seconds = time.perf_counter() - start
    return Verdict(str(folder), damage, 0 if damage else read_manifest(folder).num_bytes, seconds)
