"""The tensors of a checkpoint: each rank writes its own parts, and reads the parts that its layout needs.

Parameters and optimizer state are `DTensor`s, so a checkpoint written at one layout loads at another. Only the padding
of the vocabulary differs between tensor sizes: `padded` names the tensors whose rows may differ in number, and how many
of them are real.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from crosscut.checkpoint.folders import Progress, checkpoint_folder, list_checkpoints, read_progress, write_progress
from crosscut.config import CheckpointError


def save_checkpoint(
    root: Path, progress: Progress, *, model: nn.Module, optimizer: Optimizer, is_first_rank: bool, keep: int
) -> Path:
    """Write a checkpoint of all ranks under `root` and drop all but the newest `keep`. Every rank calls it."""
    folder = checkpoint_folder(root, progress.step)
    partial = folder.with_name(f".{folder.name}.partial")
    if is_first_rank and partial.exists():
        shutil.rmtree(partial)  # a killed run's
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)  # waits for all ranks
    if is_first_rank:
        write_progress(partial, progress)
        if folder.exists():
            _remove(folder)
        partial.rename(folder)
        for old in list_checkpoints(root)[:-keep]:
            _remove(old)
    return folder


def _remove(folder: Path) -> None:
    """Drop a checkpoint, at no moment leaving a part of it under its name."""
    dropped = folder.with_name(f".{folder.name}.dropped")
    shutil.rmtree(dropped, ignore_errors=True)
    folder.rename(dropped)
    shutil.rmtree(dropped)


def load_checkpoint(
    folder: Path, *, model: nn.Module, optimizer: Optimizer, padded: Mapping[str, int] | None = None
) -> Progress:
    """Fill the model and the optimizer from a checkpoint of any layout. Every rank calls it.

    `padded` maps a parameter's name to its real rows. Raises `CheckpointError` when the checkpoint is damaged or of
    another model.
    """
    progress = read_progress(folder)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    _load({"model": model_state, "optimizer": optimizer_state}, folder, padded or {})
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return progress


def load_model(folder: Path, *, model: nn.Module, padded: Mapping[str, int] | None = None) -> Progress:
    """Fill the model alone from a checkpoint of any layout. Every rank calls it. Raises as `load_checkpoint`."""
    progress = read_progress(folder)
    state = get_model_state_dict(model)
    _load({"model": state}, folder, padded or {})
    set_model_state_dict(model, state)
    return progress


def _load(state: dict[str, Any], folder: Path, padded: Mapping[str, int]) -> None:
    try:
        dcp.load(state, checkpoint_id=folder, planner=_PaddingLoadPlanner(padded))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"`{folder}` must be a whole checkpoint of this model, but could not be read: {_reason(error)}."
        ) from error


def _reason(error: BaseException) -> str:
    inner = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return str(inner).strip().splitlines()[0].rstrip(".") if str(inner).strip() else type(inner).__name__


class _PaddingLoadPlanner(DefaultLoadPlanner):
    """Lets the rows of padded tensors differ in number; rows that were not saved stay as they are."""

    def __init__(self, padded: Mapping[str, int]) -> None:
        super().__init__()
        self.padded = padded

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        entries = {key: self._fit(key, entry) for key, entry in metadata.state_dict_metadata.items()}
        self.metadata = dataclasses.replace(metadata, state_dict_metadata=entries)

    def _fit(self, key: str, saved: Any) -> Any:
        ours = self.state_dict.get(key)
        real = next((rows for name, rows in self.padded.items() if f".{name}" in key), None)
        if real is None or not isinstance(saved, TensorStorageMetadata) or not saved.size or ours is None:
            return saved
        if saved.size[1:] != ours.shape[1:] or min(saved.size[0], ours.shape[0]) < real:
            return saved  # a true mismatch, which PyTorch reports
        return dataclasses.replace(saved, size=ours.shape)
