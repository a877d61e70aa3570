"""Saving and loading a run's state on any layout, through `torch.distributed.checkpoint`.

Knows tensors and placements, not models. A checkpoint is a folder `step-00001000`; it is written under a hidden name
beside and renamed when whole, so a folder with the right name is a whole checkpoint.
"""

from crosscut.checkpoint.folders import (
    Progress,
    checkpoint_folder,
    latest_checkpoint,
    list_checkpoints,
    read_progress,
    require_identity,
)
from crosscut.checkpoint.state import load_checkpoint, load_model, save_checkpoint

__all__ = [
    "Progress",
    "checkpoint_folder",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_model",
    "read_progress",
    "require_identity",
    "save_checkpoint",
]
