"""Load a model's layers into a model with a different head. For example, the layers of a BERT for masked tokens are
loaded into a BERT for classes.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from crosscut.checkpoint import AVERAGE, MODEL, load_model
from crosscut.checkpoint.stored import StoredTensors
from crosscut.config import CheckpointError, ConfigError, ModelConfig
from crosscut.config.checks import listed, shown
from crosscut.config.parts.head import HeadKind
from crosscut.config.published.folders import first_position_of
from crosscut.model import GPT
from crosscut.parallel import reshard
from crosscut.parallel.state.parameters import local_offsets, local_part, whole
from crosscut.pretrained.families import Weight, weights_of
from crosscut.pretrained.loading import fill, tensors_of
from crosscut.pretrained.source import ModelSource
from crosscut.pretrained.tensors import DTYPES, StoredTensor

_HEADS = ("task.", "order.", "prediction.", "output.")
"""Beginnings of the names of parameters that belong to a head."""
_CLASSIFIER = "task.classifier."
_POOLERS = ("order.pooler.", "task.pooler.")
"""Beginnings of the names of a pooler's parameters. A head with a pooler can use the pooler of another head."""


def load_trunk(model: GPT, source: ModelSource, labels: Sequence[str] = ()) -> tuple[str, ...]:
    """Fill a model, on any layout and sharding, with the weights of a source that may have another head. If both heads
    have a pooler, the pooler is loaded. If both heads have the same kind and size, the classifier is loaded, too.

    `labels` are the names of the model's classes. The classifier of a model with classes is loaded only if the source
    has the same names (`rows_of_classes`), and its rows are put into the order of `labels`.

    Returns the names of the parameters that the source does not have. These parameters keep their values, so initialise
    the model first. Every rank must call this function. Raises `ConfigError` if the layers of the model and of the
    source differ, and `CheckpointError` if the weights cannot be read or are not finite.
    """
    _require_same_layers(model.config, source)
    rows = _rows(model.config, source, labels)
    load = _from_published if source.is_published else _from_checkpoint
    new = load(model, source, has_classifier=rows is not None)
    for name, parameter in model.named_parameters():
        if rows and name.startswith(_CLASSIFIER):
            _reorder(parameter, rows)
    source.finish(model)
    return new


def rows_of_classes(source: ModelSource, labels: Sequence[str]) -> tuple[int, ...] | None:
    """Return, for each of `labels`, the index of the source's class with this name. None if the source has no classes,
    or if its names are not the same. If they are not the same as they are, they are compared without case, as in the
    examples of `transformers`.
    """
    for key in (str, str.casefold) if labels and source.model.head is HeadKind.CLASSES else ():
        theirs, ours = {key(name): index for index, name in enumerate(source.labels)}, list(map(key, labels))
        if theirs.keys() == set(ours) and len(theirs) == len(source.labels) == len(ours):
            return tuple(theirs[name] for name in ours)
    return None


def notice_of_classes(source: ModelSource, labels: Sequence[str], *, may_name: bool = False) -> str:
    """Say what happens to the classifier of the source in a model with the classes `labels`. Empty if the source has no
    classes, or the same classes in the same order. `may_name` says whether the user can name the classes with --labels.
    """
    rows = rows_of_classes(source, labels)
    if source.model.head is not HeadKind.CLASSES or rows == tuple(range(len(labels))):
        return ""
    ours, theirs = (", ".join(map(repr, names)) or "unknown" for names in (labels, source.labels))
    if rows is not None:
        return f"The classifier of `{source.folder}` is kept, with its classes in another order: {ours:.300}."
    told = f"The classifier is new: the classes of `{source.folder}` are {theirs:.300}, but must be {ours:.300}."
    spellings = {name.casefold(): name for name in labels}
    named = [name if name in labels else spellings.get(name.casefold(), name) for name in source.labels]
    is_remedy = may_name and set(labels) < set(named) and all(name and "," not in name for name in named)
    if not is_remedy or rows_of_classes(source, named) is None:
        return told
    return f"{told} To keep the classifier, pass --labels {shlex.quote(','.join(named))}."


def _rows(config: ModelConfig, source: ModelSource, labels: Sequence[str]) -> tuple[int, ...] | None:
    """Return the row of the source's classifier for each row of the model's classifier. Empty for the same rows, and
    None if the model does not get the source's classifier.
    """
    if config.head is not source.model.head or config.num_classes != source.model.num_classes:
        return None
    return rows_of_classes(source, labels) if config.num_classes else ()


@torch.no_grad()
def _reorder(parameter: Tensor, rows: Sequence[int]) -> None:
    """Put the rows of a parameter into another order, on any layout and sharding. Communication: an all-gather along
    each axis that cuts the parameter.
    """
    wanted, own = whole(parameter)[list(rows)], local_part(parameter)
    places = zip(local_offsets(parameter), own.shape, strict=True)
    own.copy_(wanted[tuple(slice(first, first + size) for first, size in places)])


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


def _from_published(model: GPT, source: ModelSource, *, has_classifier: bool) -> tuple[str, ...]:
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
        places = [(theirs.get(candidate), their_names) for candidate in _candidates(name, has_classifier)]
        # The files may hold a part of a head that the source model lacks, such as the pooler of a BertModel.
        places += [(ours[name], own_names)] if places else []
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


def _from_checkpoint(model: GPT, source: ModelSource, *, has_classifier: bool) -> tuple[str, ...]:
    group = AVERAGE if source.is_averaged else MODEL
    stored = StoredTensors(source.folder).tensors
    names, new = {}, []
    for name, parameter in model.named_parameters():
        is_padded = name in model.padded_rows
        for candidate in _candidates(name, has_classifier):
            entry = stored.get(f"{group}.{candidate}")
            if entry is not None and (is_padded or tuple(entry.shape) == tuple(parameter.shape)):
                names[name] = candidate
                break
        else:
            new.append(name)
    load_model(source.folder, model=model, padded=model.padded_rows, group=group, names=names)
    return _only_heads(new, source)


def _candidates(name: str, has_classifier: bool) -> Iterable[str]:
    """Yield the names under which the source may hold a parameter. Yields nothing for the classifier of a task, unless
    `has_classifier` says that the source has it.
    """
    if has_classifier or not name.startswith(_CLASSIFIER):
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
