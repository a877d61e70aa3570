"""Save and load a run's state on any layout, through `torch.distributed.checkpoint`.

This package handles tensors and their placements, and does not depend on the model. A checkpoint is a folder such as
`step-00001000`, and is created atomically. The manifest in this folder shows whether any file has changed since the
checkpoint was written (docs/checkpoints.md).
"""

from crosscut.checkpoint.damage import find_damage, require_undamaged
from crosscut.checkpoint.folders import (
    GoodCheckpoint,
    checkpoint_folder,
    latest_good_checkpoint,
    list_checkpoints,
    mark_passed_over,
    require_identity,
)
from crosscut.checkpoint.format.manifest import AVERAGE, MODEL, Manifest, Progress, holds_average, read_manifest
from crosscut.checkpoint.saving.saver import Saver, save_checkpoint
from crosscut.checkpoint.state import load_checkpoint, load_model
from crosscut.checkpoint.storage import Folder, folder_at

__all__ = [
    "AVERAGE",
    "MODEL",
    "Folder",
    "GoodCheckpoint",
    "Manifest",
    "Progress",
    "Saver",
    "checkpoint_folder",
    "find_damage",
    "folder_at",
    "holds_average",
    "latest_good_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_model",
    "mark_passed_over",
    "read_manifest",
    "require_identity",
    "require_undamaged",
    "save_checkpoint",
]
