"""The tensors of a run, read from a checkpoint of any layout.

Parameters and optimizer state are `DTensor`s, so a checkpoint written at one layout loads at another. Only the padding
of the vocabulary differs between tensor sizes: `padded` names the tensors whose rows may differ in number, and how many
of them are real.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from crosscut.checkpoint.manifest import Progress, read_manifest
from crosscut.checkpoint.reader import CheckpointReader, PaddingLoadPlanner
from crosscut.checkpoint.storage import Folder, folder_at, reason
from crosscut.config import CheckpointError
from crosscut.parallel import reshard

More = Mapping[str, Mapping[str, Tensor]]
"""Further tensors of a run's state that every rank holds whole, by name and by a name of their own."""


def state_of(model: nn.Module, optimizer: Optimizer, more: More | None = None) -> dict[str, Any]:
    """The state of a run as it is saved: tensors that the run goes on to change, and copies of all else."""
    reshard(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    further = {name: dict(tensors) for name, tensors in (more or {}).items()}
    return {"model": model_state, "optimizer": optimizer_state, **further}


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in a state by the flat names that a checkpoint has for them."""
    planner = DefaultSavePlanner()  # whose names they are
    planner.set_up_planner(state)
    return {name: value for name, value in planner.state_dict.items() if isinstance(value, Tensor)}


def load_checkpoint(
    checkpoint: str | Path | Folder,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    more: More | None = None,
    padded: Mapping[str, int] | None = None,
) -> Progress:
    """Fill the model and the optimizer from a checkpoint of any layout. Every rank calls it.

    `padded` maps a parameter's name to its real rows. Of `more`, what the checkpoint does not hold stays as it is: it
    was written by a run that did not need it. The hashes are not compared here, since each rank would read
    all files for it: `latest_good_checkpoint` or `require_undamaged` has done so in one process. Raises
    `CheckpointError` when the checkpoint cannot be read or is of another model.
    """
    folder = folder_at(checkpoint)
    manifest = read_manifest(folder)
    reshard(model)
    _make_state(optimizer)
    held = {name: t for name, t in (more or {}).items() if all(f"{name}.{key}" in manifest.tensors for key in t)}
    state = state_of(model, optimizer, held)
    _load(state, folder, padded or {})
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return manifest.progress


def _make_state(optimizer: Optimizer) -> None:
    """Let a new optimizer make the tensors that it keeps, as its first step does, with one gradient at a time.

    PyTorch does so by itself, but with a gradient for every parameter, which is a third more memory than the state.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):  # so that the largest gradient is gone first
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if any(parameter.is_cuda for parameter in parameters):  # a state in host memory may still be on its way there
        torch.cuda.synchronize()


def load_model(
    checkpoint: str | Path | Folder, *, model: nn.Module, padded: Mapping[str, int] | None = None
) -> Progress:
    """Fill the model alone from a checkpoint of any layout. Every rank calls it. Raises as `load_checkpoint`."""
    folder = folder_at(checkpoint)
    progress = read_manifest(folder).progress
    reshard(model)
    state = get_model_state_dict(model)
    _load({"model": state}, folder, padded or {})
    set_model_state_dict(model, state)
    return progress


def _load(state: dict[str, Any], folder: Folder, padded: Mapping[str, int]) -> None:
    try:
        dcp.load(state, storage_reader=CheckpointReader(folder), planner=PaddingLoadPlanner(padded))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"`{folder}` must be a whole checkpoint of this model, but could not be read: {reason(first_cause(error))}."
        ) from error


def first_cause(error: BaseException) -> BaseException:
    """The error of the first rank that failed, taken out of the error that PyTorch raises on all ranks."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
