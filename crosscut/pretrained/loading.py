"""Load a published model's files into a sharded model. Every rank reads only its own rows and columns."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from crosscut.architecture import Parameter, describe
from crosscut.config import CheckpointError, ModelConfig
from crosscut.config.checks import listed
from crosscut.config.published.folders import first_position_of, is_published, read_published
from crosscut.parallel import reshard
from crosscut.parallel.state.parameters import local_offsets, local_part
from crosscut.pretrained.families import (
    Weight,
    count_layers,
    further_layers,
    is_harmless,
    is_head,
    joined_tensors,
    published_shapes,
    tied_names,
    weights_of,
    with_prefix,
)
from crosscut.pretrained.tensors import DTYPES, StoredTensor, blocks, cut_again, list_tensors

_MOST_NAMED = 3
"""Maximum number of tensors that a message names. Further tensors are only counted."""


def load_weights(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Fill a model, on any layout and sharding, from the files of a folder. The values are converted to the element
    type of the parameters.

    If only the model has experts, each expert gets a copy of the MLP in the folder, and the routers stay as they are.

    Each rank reads without communication. In addition to its part of the model, a rank holds only a few megabytes at a
    time. Raises `CheckpointError`, on all ranks, if the tensors in the files are not exactly the tensors of the model.
    """
    stored = model_in(folder, config)
    tensors = require_weights(stored, folder)
    reshard(model)
    parameters, stacks = dict(model.named_parameters()), _stacks(config, stored)
    for weight in weights_of(stored, first_position=first_position_of(folder)):
        into, name = (fill_copies, stacks[weight.name]) if weight.name in stacks else (fill, weight.name)
        if name in parameters:  # a stage of a pipeline has only its own
            into(parameters[name], weight, tensors)


def model_in(folder: Path, config: ModelConfig) -> ModelConfig:
    """Model whose tensors a folder holds, for a model that starts from the folder: the same model, or the one without
    experts if only `config` has experts.
    """
    is_dense = config.num_experts and is_published(folder) and not read_published(folder).model.num_experts
    return config.without_experts if is_dense else config


def _stacks(config: ModelConfig, stored: ModelConfig) -> dict[str, str]:
    """Names of the stacks of the experts that get copies, by the names of the MLPs' matrices in the model `stored`. An
    MLP and an expert have the same matrices in the same order.
    """
    if config == stored:
        return {}
    ours, theirs = (_layer_parameters(each) for each in (config, stored))
    matrices = (name for name in theirs if name not in ours)
    return dict(zip(matrices, (name for name, parameter in ours.items() if parameter.stacked), strict=True))


def _layer_parameters(config: ModelConfig) -> dict[str, Parameter]:
    layers = enumerate(describe(config).layers)
    named = (parameter.named(f"blocks.{i}.") for i, layer in layers for parameter in layer.parameters())
    return {parameter.name: parameter for parameter in named}


def require_weights(config: ModelConfig, folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of a folder, keyed by their full names, after checking that they are exactly the tensors of the
    model (`model_in`). An encoder's files may also hold heads and a pooler (`heads_left_out`).

    Raises `CheckpointError` for missing tensors, unknown tensors, and tensors with a different shape or type.
    """
    config = model_in(folder, config)
    tensors = tensors_of(config, folder)
    num_layers = count_layers(config, tensors)
    if num_layers and num_layers != config.num_layers:  # first, because a config may name very many layers
        raise CheckpointError(
            f"`{folder}` must hold the tensors of {config.num_layers:,} layers (`config.json`), but holds "
            f"{num_layers:,} layers. Download the model again."
        )
    shapes = published_shapes(config, first_position=first_position_of(folder))
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(
            f"`{folder}` must hold all tensors of the model in its `config.json`, but lacks {_named(missing)}. "
            "Download the missing files."
        )
    extra = (name for name in tensors if name not in shapes)
    if left := [name for name in extra if not is_harmless(config, name) and not is_head(config, name)]:
        raise CheckpointError(
            f"`{folder}` must hold only the tensors of the model in its `config.json`, but also has "
            f"{_named(left)}. The model computes something that Crosscut does not support. Choose "
            "another model."
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"`{name}` in `{tensor.path}` must have the shape {list(shape)} from `config.json`, but has "
                f"{list(tensor.shape)}. Download the model again."
            )
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"`{name}` in `{tensor.path}` must have type {listed(DTYPES)}, but has {tensor.dtype}. "
                "Quantised weights are not supported. Use the original model."
            )
    return tensors


def tensors_of(config: ModelConfig, folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of a folder, keyed by their full names in the model's family."""
    found = list_tensors(folder)
    tensors = {full: found[name] for full, name in with_prefix(config, list(found)).items()}
    if left := further_layers(config, tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(left)}
    for whole, parts in joined_tensors(config):
        held = [whole] if whole in tensors else [part for part in parts if part in tensors]
        if held and {name: tensors[name].shape[0] for name in held} != parts:
            again = cut_again([tensors.pop(name) for name in held], [*parts.values()])
            tensors.update(zip(parts, again, strict=True))
    embedding, output = tied_names(config)
    if embedding not in tensors and output in tensors:  # the files may hold either of two equal tensors
        tensors[embedding] = tensors[output]
    return tensors


def heads_left_out(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the tensors that Crosscut does not load because they belong to a head or a pooler that the model does not
    have. `names` are the full names of a published model's tensors.
    """
    own = published_shapes(config)
    left = (name for name in names if is_head(config, name) and name not in own and not is_harmless(config, name))
    return tuple(sorted(left))


def _named(names: list[str]) -> str:
    """Format the first names of a list, and the number of further names."""
    first = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    return first if len(names) <= _MOST_NAMED else f"{first} and {len(names) - _MOST_NAMED} more"


@torch.no_grad()
def fill_copies(stack: Tensor, weight: Weight, tensors: Mapping[str, StoredTensor]) -> None:
    """Read this rank's part of one matrix, and copy it to all matrices of the rank in a stack [experts, out, in]."""
    local = local_part(stack)
    if len(local):  # with ZeRO, a rank may store no expert
        _fill(local[0], local_offsets(stack)[1:], weight, tensors)
        local[1:] = local[0]


@torch.no_grad()
def fill(parameter: Tensor, weight: Weight, tensors: Mapping[str, StoredTensor]) -> None:
    """Read this rank's part of a parameter. Padding rows are set to zero. `tensors` are the stored tensors, keyed by
    their full names.
    """
    local, offsets = local_part(parameter), local_offsets(parameter)
    if not weight.stacked:
        _fill(local, offsets, weight, tensors)
        return
    for place, matrix in enumerate(local):
        _fill(matrix, offsets[1:], weight.matrix(offsets[0] + place), tensors)


def _fill(local: Tensor, offsets: list[int], weight: Weight, tensors: Mapping[str, StoredTensor]) -> None:
    """Read a part of a weight that begins at `offsets` into `local`."""
    columns = [slice(o, o + size) for o, size in zip(offsets[1:], local.shape[1:], strict=True)]
    local[max(0, weight.shape[0] - offsets[0]) :] = 0.0
    for index, source in enumerate(weight.sources):
        ours = weight.rows(index) - offsets[0]
        inside = ((ours >= 0) & (ours < len(local))).nonzero().flatten()
        if not inside.numel() or not local.numel():
            continue
        held = slice(int(inside[0]), int(inside[-1]) + 1)  # with swapped halves, some may belong to another rank
        stored = tensors[source.name] if source.matrix is None else tensors[source.name].matrix(source.matrix)
        for rows, own in _runs(weight.places(index)[held], ours[held]):
            if source.transposed and columns:
                for first, block in blocks(stored, (*columns, rows)):
                    _put(local[:, first : first + len(block)], own, block.t())
            else:
                channel = [slice(0, 1)] * (len(stored.shape) - 1 - len(columns))
                for first, block in blocks(stored, (rows, *channel, *columns)):
                    _put(local, own[first : first + len(block)], block.view(-1, *local.shape[1:]))


def _runs(theirs: Tensor, ours: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the runs of adjacent rows in `theirs`, each with its entries of `ours`."""
    ends = (theirs.diff() != 1).nonzero().flatten() + 1
    for rows, own in zip(theirs.tensor_split(ends), ours.tensor_split(ends), strict=True):
        yield slice(int(rows[0]), int(rows[-1]) + 1), own


def _put(local: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write `values` into the rows of `local` with the indices `rows`. Indices outside of `local` are skipped. Values
    are converted to the type of `local`; for consecutive rows, this needs no intermediate copy.
    """
    if not (held := (rows >= 0) & (rows < len(local))).all():
        rows, values = rows[held], values[held]
    if not len(rows):
        return
    first, last = int(rows[0]), int(rows[-1])
    if first <= last and torch.equal(rows, torch.arange(first, last + 1)):
        local[first : last + 1].copy_(values)
    else:
        local.index_copy_(0, rows.to(local.device), values.to(local))
