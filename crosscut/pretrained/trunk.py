"""Load a model's layers into a model with a different head. For example, the layers of a BERT for masked tokens are
loaded into a BERT for classes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from crosscut.checkpoint import AVERAGE, MODEL, load_model
from crosscut.checkpoint.stored import StoredTensors
from crosscut.config import CheckpointError, ConfigError, ModelConfig
from crosscut.config.checks import listed, shown
from crosscut.config.published.folders import first_position_of
from crosscut.model import GPT
from crosscut.parallel import reshard
from crosscut.pretrained.families import Weight, weights_of
from crosscut.pretrained.loading import fill, tensors_of
from crosscut.pretrained.source import ModelSource
from crosscut.pretrained.tensors import DTYPES, StoredTensor

_HEADS = ("task.", "order.", "prediction.", "output.")
"""Beginnings of the names of parameters that belong to a head."""
_CLASSIFIER = "task.classifier."
_POOLERS = ("order.pooler.", "task.pooler.")
"""Beginnings of the names of a pooler's parameters. A head with a pooler can use the pooler of another head."""


def load_trunk(model: GPT, source: ModelSource) -> tuple[str, ...]:
    """Fill a model, on any layout and sharding, with the weights of a source that may have another head. If both heads
    have a pooler, the pooler is loaded. If both heads have the same kind and size, the classifier is loaded, too.

    Returns the names of the parameters that the source does not have. These parameters keep their values, so initialise
    the model first. Every rank must call this function. Raises `ConfigError` if the layers of the model and of the
    source differ, and `CheckpointError` if the weights cannot be read or are not finite.
    """
    _require_same_layers(model.config, source)
    new = _from_published(model, source) if source.is_published else _from_checkpoint(model, source)
    source.finish(model)
    return new


def _require_same_layers(model: ModelConfig, source: ModelSource) -> None:
    """Raise `ConfigError` if the model and the source differ in more than their heads and dropout."""
    if source.model.lora_rank:
        raise ConfigError(
            f"`{source.folder}` must be a model without adapters of its own, but has adapters "
            f"(`model.lora_rank` is {source.model.lora_rank}). Merge the adapters with `crosscut checkpoint export`."
        )
    ours, theirs = (asdict(replace(each.with_head("next_token"), dropout=0.0)) for each in (model, source.model))
    if different := [name for name in ours if ours[name] != theirs[name]]:
        name = different[0]
        raise ConfigError(
            f"`model.{name}` must be {shown(theirs[name])} to load the layers of `{source.folder}`, but is "
            f"{shown(ours[name])}. Use the settings of the model in `{source.folder}`, and change only the head."
        )


def _from_published(model: GPT, source: ModelSource) -> tuple[str, ...]:
    folder = Path(str(source.folder))
    first_position = first_position_of(folder)
    ours, theirs = (
        {weight.name: weight for weight in weights_of(config, first_position=first_position)}
        for config in (model.config, source.model)
    )
    own_names, their_names = (tensors_of(config, folder) for config in (model.config, source.model))
    reshard(model)
    new = []
    for name, parameter in model.named_parameters():
        places = [(theirs.get(candidate), their_names) for candidate in _candidates(name, model.config, source.model)]
        # The files may hold a head that the source model lacks, such as the pooler of a BertModel.
        places.append((ours[name], own_names))
        for weight, tensors in places:
            if weight is not None and weight.shape == ours[name].shape and _holds(tensors, weight):
                fill(parameter, weight, tensors)
                break
        else:
            new.append(name)
    return _only_heads(new, source)


def _holds(tensors: Mapping[str, StoredTensor], weight: Weight) -> bool:
    """Whether a folder has all published tensors of a weight, with the right shapes and supported types."""
    found = [(tensors.get(part.name), weight.shape_of(part)) for part in weight.sources]
    return all(tensor is not None and tensor.shape == shape and tensor.dtype in DTYPES for tensor, shape in found)


def _from_checkpoint(model: GPT, source: ModelSource) -> tuple[str, ...]:
    group = AVERAGE if source.is_averaged else MODEL
    stored = StoredTensors(source.folder).tensors
    names, new = {}, []
    for name, parameter in model.named_parameters():
        is_padded = name in model.padded_rows
        for candidate in _candidates(name, model.config, source.model):
            entry = stored.get(f"{group}.{candidate}")
            if entry is not None and (is_padded or tuple(entry.shape) == tuple(parameter.shape)):
                names[name] = candidate
                break
        else:
            new.append(name)
    load_model(source.folder, model=model, padded=model.padded_rows, group=group, names=names)
    return _only_heads(new, source)


def _candidates(name: str, ours: ModelConfig, theirs: ModelConfig) -> Iterable[str]:
    """Yield the names under which the source may hold a parameter. Yields nothing for the classifier of a head that the
    source lacks.
    """
    if ours.head is theirs.head or not name.startswith(_CLASSIFIER):
        yield name
    if start := next((start for start in _POOLERS if name.startswith(start)), ""):
        yield from (other + name.removeprefix(start) for other in _POOLERS if other != start)


def _only_heads(new: list[str], source: ModelSource) -> tuple[str, ...]:
    """Return `new`, the names of the parameters that the source lacks. Raises `CheckpointError` if one of these
    parameters belongs to no head.
    """
    if missing := [name for name in new if not name.startswith(_HEADS)]:
        raise CheckpointError(
            f"`{source.folder}` must hold the weights of all layers, but lacks {listed(missing)}. Choose another model."
        )
    return tuple(new)
