"""From the files of a published model into a cut one: every rank reads its own rows and columns, and no others."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from crosscut.config import CheckpointError, ModelConfig
from crosscut.config.checks import listed
from crosscut.parallel import reshard
from crosscut.parallel.state.parameters import local_offsets, local_part
from crosscut.pretrained.families import Weight, is_harmless, published_shapes, weights_of, with_prefix
from crosscut.pretrained.tensors import DTYPES, StoredTensor, blocks, list_tensors

_MOST_NAMED = 3
"""Tensors that a message names before it only counts."""


def load_weights(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Fill a model, cut and sharded in any way, from a folder's files, in the type of its parameters.

    Each rank reads on its own; none sends anything. Beside its share a rank holds a few megabytes at a time. Raises
    `CheckpointError`, on all ranks alike, where the files do not hold the model's tensors, or hold others.
    """
    tensors = require_weights(config, folder)
    reshard(model)
    parameters = dict(model.named_parameters())
    for weight in weights_of(config):
        _fill(parameters[weight.name], weight, tensors)


def require_weights(config: ModelConfig, folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by their full names, all that the model needs and none that is unknown.

    Raises `CheckpointError` naming what is missing, left over, or of another shape or type.
    """
    found = list_tensors(folder)
    tensors = {full: found[name] for full, name in with_prefix(config, list(found)).items()}
    shapes = published_shapes(config)
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(
            f"`{folder}` must hold all tensors that its `config.json` tells of, but lacks {_named(missing)}. Download "
            "the missing files."
        )
    if left := [name for name in tensors if name not in shapes and not is_harmless(config, name)]:
        raise CheckpointError(
            f"`{folder}` must hold no tensors but those that its `config.json` tells of, but has {_named(left)}. The "
            "model computes something that Crosscut's does not."
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"`{name}` in `{tensor.path}` must have the shape {list(shape)} that `config.json` tells of, but has "
                f"{list(tensor.shape)}."
            )
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"`{name}` in `{tensor.path}` must be of type {listed(DTYPES)}, but is {tensor.dtype}. "
                "Quantised weights cannot be read: take the model that they were made from."
            )
    return tensors


def _named(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    first = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    return first if len(names) <= _MOST_NAMED else f"{first} and {len(names) - _MOST_NAMED} more"


@torch.no_grad()
def _fill(parameter: Tensor, weight: Weight, tensors: Mapping[str, StoredTensor]) -> None:
    """Read this rank's part of a parameter; rows beyond the real ones are zero."""
    local, offsets = local_part(parameter), local_offsets(parameter)
    columns = [slice(o, o + size) for o, size in zip(offsets[1:], local.shape[1:], strict=True)]
    local[max(0, weight.shape[0] - offsets[0]) :] = 0.0
    for index, source in enumerate(weight.sources):
        ours = weight.rows(index) - offsets[0]
        inside = ((ours >= 0) & (ours < len(local))).nonzero().flatten()
        if not inside.numel() or not local.numel():
            continue
        ours = ours[inside]
        start = source.start + int(inside[0])
        rows = slice(start, start + len(inside))
        if source.transposed and columns:
            for first, block in blocks(tensors[source.name], (*columns, rows)):
                _put(local[:, first : first + len(block)], ours, block.t())
        else:
            for first, block in blocks(tensors[source.name], (rows, *columns)):
                _put(local, ours[first : first + len(block)], block)


def _put(local: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set some rows, in their own type; those that follow each other without a copy in between."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        local[first : last + 1].copy_(values)
    else:
        local.index_copy_(0, rows.to(local.device), values.to(local))
