"""Collect the state of a run as tensors, and load the state from a checkpoint that was written on any layout.

Parameters and optimizer state are `DTensor`s, so a checkpoint that was written on one layout can be loaded on another
layout. Only the padding of the vocabulary depends on the tensor-parallel size. For this reason, `padded` gives the
number of rows without padding for each padded parameter.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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

from crosscut.checkpoint.format.manifest import MODEL, Progress, read_manifest
from crosscut.checkpoint.reader import CheckpointReader, PaddingLoadPlanner, StateDict
from crosscut.checkpoint.storage import Folder, folder_at, reason
from crosscut.config import CheckpointError
from crosscut.parallel import reshard

More = Mapping[str, Mapping[str, Tensor]]
"""Additional tensors of a run's state, such as the float16 loss scale, keyed by group and then by tensor name. Every
rank holds the whole of a tensor that is not a `DTensor`."""


def state_of(model: nn.Module, optimizer: Optimizer, more: More | None = None) -> StateDict:
    """Collect the state of a run for a checkpoint. The tensors are not copied, so later optimizer steps change them.
    All other values are copies.
    """
    reshard(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    further = {name: dict(tensors) for name, tensors in (more or {}).items()}
    return {MODEL: model_state, "optimizer": optimizer_state, **further}


def tensors_of(state: StateDict) -> dict[str, Tensor]:
    """Return the tensors in a state, keyed by their flat names in the checkpoint."""
    planner = DefaultSavePlanner()  # the planner defines the names
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
    """Load the model and the optimizer from a checkpoint of any layout, and return the run's progress. Every rank must
    call this function.

    The optimizer gets its state from the checkpoint and keeps its own settings, such as the betas. `padded` maps the
    name of each padded parameter to the number of rows without padding. A group in `more` keeps its current values if
    the checkpoint does not hold all tensors of the group. Hashes are not checked here, because each rank would have to
    read all files. Call `latest_good_checkpoint` or `require_undamaged` in one process first. Raises `CheckpointError`
    if the checkpoint cannot be read or belongs to another model.
    """
    folder = folder_at(checkpoint)
    manifest = read_manifest(folder)
    reshard(model)
    _make_state(optimizer)
    held = {name: t for name, t in (more or {}).items() if all(f"{name}.{key}" in manifest.tensors for key in t)}
    state = state_of(model, optimizer, held)
    groups = copy.deepcopy(state["optimizer"].pop("param_groups"))  # the checkpoint's settings are not used
    with _reading(folder):
        _load(state, folder, padded or {})
        state["optimizer"]["param_groups"] = groups
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return manifest.progress


def _make_state(optimizer: Optimizer) -> None:
    """Make a new optimizer allocate its state, by taking a step with learning rate 0 for one parameter after another.

    PyTorch would otherwise take this step for all parameters together, and the gradients of all parameters would be in
    memory at once. With Adam, this increases the peak memory by a third.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):  # start with the largest gradient
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if any(parameter.is_cuda for parameter in parameters):  # a copy to host memory may still be in progress
        torch.cuda.synchronize()


def load_model(
    checkpoint: str | Path | Folder,
    *,
    model: nn.Module,
    padded: Mapping[str, int] | None = None,
    group: str = MODEL,
    names: Mapping[str, str] | None = None,
) -> Progress:
    """Load only the model from a checkpoint of any layout, and return the run's progress. Every rank must call this
    function. Raises the same errors as `load_checkpoint`, but only on the ranks on which the error occurs. `group`
    names the group of tensors to load: `MODEL`, or `AVERAGE` if the checkpoint holds a moving average of the weights.
    `names` maps the names of the parameters to load to their names in the checkpoint; all other parameters keep their
    values. By default, all parameters are loaded under their own names.

    Each rank reads its own parts alone. If the ranks read together, PyTorch would exchange its plans as pickled
    objects, and ranks that serve a model must not exchange pickled objects.
    """
    folder = folder_at(checkpoint)
    progress = read_manifest(folder).progress
    reshard(model)
    state = get_model_state_dict(model)
    with _reading(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: each rank reads alone
        wanted = state if names is None else {stored: state[name] for name, stored in names.items()}
        _load({group: wanted}, folder, padded or {}, alone=True)
        set_model_state_dict(model, state)
    return progress


def _load(state: StateDict, folder: Folder, padded: Mapping[str, int], *, alone: bool = False) -> None:
    reader, planner = CheckpointReader(folder), PaddingLoadPlanner(padded)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=alone)


@contextmanager
def _reading(folder: Folder) -> Iterator[None]:
    """Context that converts any error to a `CheckpointError`. A checkpoint's files may hold anything, so reading a
    checkpoint may raise any error.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"`{folder}` must be a complete checkpoint of this model, but cannot be read: "
            f"{reason(first_cause(error))}. To check its files, run `crosscut checkpoint verify {folder}`."
        ) from error


def first_cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed if `error` is the `CheckpointException` that PyTorch raises on all
    ranks. Return any other error unchanged.
    """
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
