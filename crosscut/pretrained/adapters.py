"""Low-rank adapters (LoRA) in PEFT's file format: `adapter_config.json` and `adapter_model.safetensors`.

PEFT names an adapter's matrices A [r, inputs] and B [outputs, r] after the published tensor W that the adapter changes:
W + scale x B A. Crosscut reads an adapter in addition to its model and merges the adapter into the weights, on any
layout: each rank computes only its own rows and columns of B A. A run with adapters (`model.lora_rank`) is written in
the same format.

Published queries, keys and values are separate tensors, or one stacked tensor (GPT-2). A stacked tensor has one A and
one B, so the adapters of queries, keys and values become the blocks of a block-diagonal B, and the LoRA rank is three
times as high.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from crosscut.checkpoint import Folder
from crosscut.checkpoint.format.tensor_file import Form, file_header, tensor_bytes
from crosscut.config import CheckpointError, ModelConfig
from crosscut.config.checks import shown
from crosscut.parallel import reshard
from crosscut.parallel.state.parameters import local_offsets, local_part
from crosscut.pretrained.adapter_settings import CONFIG_NAME, AdapterSettings, read_settings
from crosscut.pretrained.families import Weight, weights_of, with_prefix
from crosscut.pretrained.names import Source
from crosscut.pretrained.tensors import DTYPES, StoredTensor, list_file, read_whole
from crosscut.pretrained.writing import json_bytes

TENSORS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class _Changed:
    """Change of one published tensor by an adapter."""

    down: StoredTensor
    """Matrix A in the adapter's file."""
    up: StoredTensor
    """Matrix B in the adapter's file."""
    scale: float

    def delta(self, rows: Tensor, columns: slice) -> Tensor:
        """Compute these rows and columns of scale x B A, in float32 or wider. The rows are outputs, and the columns are
        inputs.
        """
        up, down = read_whole(self.up)[rows], read_whole(self.down)[:, columns]
        wide = torch.promote_types(torch.promote_types(up.dtype, down.dtype), torch.float32)
        return self.scale * (up.to(wide) @ down.to(wide))


@dataclass(frozen=True)
class PublishedAdapter:
    """An adapter in PEFT's format that fits a model. Create the object with `read_adapter`."""

    model: ModelConfig
    changed: Mapping[str, _Changed]
    """Changed tensors, keyed by the published name of the weight."""
    base: str = ""
    """Name of the model with which the adapter was trained. Empty if it is not known."""
    notice: str = ""
    """Line for the user about settings that Crosscut ignores. Empty if there are none."""

    def notice_of_base(self, folder: Path) -> str:
        """Line for the user if the adapter was trained with a model whose name is no folder in the path of the model in
        `folder`. The tensors of another model may have the same shapes. Empty if the names agree.
        """
        name = self.base.rstrip("/").rpartition("/")[2].casefold()
        folders = [part.casefold() for part in folder.resolve().parts]
        if not name or name in folders or name in "--".join(folders).split("--"):  # as in models--org--name of the hub
            return ""
        return (
            f"The adapter was trained with the model `{shown(self.base[:200])[1:-1]}` (`base_model_name_or_path`), but "
            f"`{folder}` has another name. If it is another model, the result means nothing."
        )

    @torch.no_grad()
    def merge(self, model: nn.Module) -> None:
        """Add the adapter to a model's weights in place, on any layout and sharding. The ranks need no
        communication.
        """
        reshard(model)
        parameters = dict(model.named_parameters())
        for weight, index, source in _sources(self.model):
            if (change := self.changed.get(source.name)) is None:
                continue
            parameter = parameters[weight.name]
            local, offsets = local_part(parameter), local_offsets(parameter)
            ours = weight.rows(index) - offsets[0]
            held = (ours >= 0) & (ours < len(local))
            theirs = weight.places(index)[held]
            delta = change.delta(theirs, slice(offsets[1], offsets[1] + local.shape[1]))
            ours = ours[held].to(local.device)
            local[ours] = (local[ours] + delta.to(local.device)).to(local.dtype)

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """Return a published tensor with the adapter's change."""
        if (change := self.changed.get(name)) is None:
            return tensor
        is_transposed = self._transposed[name]
        rows, columns = tensor.t().shape if is_transposed else tensor.shape
        delta = change.delta(torch.arange(rows), slice(0, columns))
        return (tensor + (delta.t() if is_transposed else delta)).to(tensor.dtype)

    @cached_property
    def _transposed(self) -> dict[str, bool]:
        return {source.name: source.transposed for _, _, source in _sources(self.model)}


def read_adapter(folder: str | Path, model: ModelConfig) -> PublishedAdapter:
    """Read an adapter in PEFT's format, and check that it fits the model. The LoRA rank may differ from weight to
    weight.

    Raises `ConfigError` for settings that Crosscut does not support, and `CheckpointError` if a file is missing or
    damaged, or if a tensor does not belong to the model.
    """
    folder = Path(folder)
    settings = read_settings(folder / CONFIG_NAME)
    path = folder / TENSORS_NAME
    if not path.is_file():
        raise CheckpointError(
            f"`{folder}` must hold `{TENSORS_NAME}`, but does not. Save the adapter as safetensors with "
            "`save_pretrained`."
        )
    shapes = {source.name: (weight.shape[1], _outputs(weight, source)) for weight, _, source in _sources(model)}
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in list_file(path).items():
        match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise _other(path, name)
        found.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
    names = {own: full for full, own in with_prefix(model, list(found)).items()}
    for name, pair in found.items():
        if names[name] not in shapes:
            raise _other(path, next(iter(pair.values())).name)
        if key := settings.excluded_by(name.removesuffix(".weight")):
            raise CheckpointError(
                f"`{key}` in `{settings.path}` must include all matrices in `{TENSORS_NAME}`, but leaves out `{name}`. "
                "PEFT ignores this matrix. Download both files of the adapter again."
            )
    changed = {names[name]: _change(path, name, pair, shapes[names[name]], settings) for name, pair in found.items()}
    return PublishedAdapter(model, changed, settings.base, settings.notice)


def _other(path: Path, name: str) -> CheckpointError:
    """Error for the tensor `name` in an adapter's file."""
    return CheckpointError(
        f"`{path}` must hold only matrices A and B of the model's layers, but has `{name}`. Choose the model that the "
        "adapter was trained with."
    )


def _change(
    path: Path, name: str, pair: Mapping[str, StoredTensor], shape: tuple[int, int], settings: AdapterSettings
) -> _Changed:
    """Return the LoRA matrices A and B of one published weight, with their scale. `shape` is (inputs, outputs) of the
    weight. Raises `CheckpointError` if a matrix is missing or has a wrong shape or type.
    """
    down, up = pair.get("A"), pair.get("B")
    inputs, outputs = shape
    rank = down.shape[0] if down is not None and len(down.shape) == 2 else 0
    shapes = [(rank, inputs), (outputs, rank)]
    if down is None or up is None or [down.shape, up.shape] != shapes or not rank:
        told = " and ".join("no matrix" if each is None else str(list(each.shape)) for each in (down, up))
        raise CheckpointError(
            f"`{name}` in `{path}` must have matrices A and B of the shapes [r, {inputs}] and [{outputs}, r], but has "
            f"{told}. Choose the model that the adapter was trained with."
        )
    if unknown := next((each for each in (down, up) if each.dtype not in DTYPES), None):
        raise CheckpointError(f"`{unknown.name}` in `{path}` must have a floating-point type, but has {unknown.dtype}.")
    module, _, _ = name.rpartition(".")
    if (given := settings.rank(module)) != rank:
        raise CheckpointError(
            f"`{name}` in `{path}` must have matrices of rank {given} (`r` and `rank_pattern` in `{CONFIG_NAME}`), but "
            f"has rank {rank}. Download both files of the adapter again."
        )
    return _Changed(down, up, settings.scale(module))


def _sources(model: ModelConfig) -> Iterator[tuple[Weight, int, Source]]:
    """Yield (weight, index, source) for each published tensor of each matrix in the layers. `index` is the index of the
    tensor among the weight's sources.
    """
    for weight in weights_of(model.without_adapters):
        if weight.is_matrix and len(weight.shape) == 2 and weight.name.startswith("blocks."):
            yield from ((weight, index, source) for index, source in enumerate(weight.sources))


def _outputs(weight: Weight, source: Source) -> int:
    """Number of outputs of a whole published tensor."""
    return source.num_rows or weight.source_rows


def with_adapters(model: ModelConfig, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return a function that works like `read`, but merges the run's own adapters into the parameters. `read` returns a
    parameter of a run, given its name. If the run has no adapters, the result is `read` itself.
    """
    if not model.lora_rank:
        return read
    weights = {weight.name: weight for weight, index, _ in _sources(model) if index == 0}

    def merged(name: str) -> Tensor:
        tensor = read(name)
        if (weight := weights.get(name)) is None:
            return tensor
        changed = tensor.clone()
        for index in range(len(weight.sources)):
            down, up, rows = _pair(model, weight, index, read)
            wide = torch.promote_types(up.dtype, torch.float32)
            delta = model.lora_alpha / model.lora_rank * (up.to(wide) @ down.to(wide))
            rows = rows.to(tensor.device)
            changed[rows] = (tensor[rows] + delta).to(tensor.dtype)
        return changed

    return merged


def _pair(
    model: ModelConfig, weight: Weight, index: int, read: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return A and B of a run's adapter for one source of a weight, and the rows of the weight that B changes."""
    module, _, _ = weight.name.rpartition(".")
    rows, rank = weight.rows(index), model.lora_rank
    down, up = read(f"{module}.adapter.down"), read(f"{module}.adapter.up")
    return down[index * rank : (index + 1) * rank], up[rows.to(up.device)], rows


def write_adapter(folder: Folder, model: ModelConfig, read: Callable[[str], Tensor], *, base: str) -> list[str]:
    """Write the adapters of a run in PEFT's format. `read` returns a parameter by its name, and `base` names the
    published model from which the run started. Returns the names of the published weights that the adapters change.
    """
    pieces: dict[str, list[tuple[Weight, int, Source]]] = {}
    for weight, index, source in _sources(model):
        pieces.setdefault(source.name, []).append((weight, index, source))
    tensors = {}
    for name, parts in pieces.items():
        down, up = _stacked(model, parts, read)
        module, _, _ = name.rpartition(".")
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = down
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = up
    with folder.create(TENSORS_NAME) as stream:
        stream.write(file_header({name: Form(tuple(t.shape), t.dtype) for name, t in tensors.items()}))
        for tensor in tensors.values():
            stream.write(tensor_bytes(tensor.contiguous()))
    folder.write(CONFIG_NAME, json_bytes(_peft_config(model, pieces, base)))
    return list(pieces)


def _stacked(
    model: ModelConfig, parts: list[tuple[Weight, int, Source]], read: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return A and B of one published tensor. Several parts of a stacked tensor become blocks on the diagonal of B."""
    pairs = [_pair(model, weight, index, read) for weight, index, _ in parts]
    if len(pairs) == 1:
        down, up, _ = pairs[0]
        return down, up
    weight, _, source = parts[0]
    rank = model.lora_rank
    joined = pairs[0][1].new_zeros(_outputs(weight, source), rank * len(parts))
    for i, ((_, up, _), (each, index, _)) in enumerate(zip(pairs, parts, strict=True)):
        joined[each.places(index).to(up.device), i * rank : (i + 1) * rank] = up
    return torch.cat([down for down, _, _ in pairs]), joined


def _peft_config(
    model: ModelConfig, pieces: Mapping[str, list[tuple[Weight, int, Source]]], base: str
) -> dict[str, object]:
    last = {name: name.split(".")[-2] for name in pieces}
    alpha = int(model.lora_alpha) if model.lora_alpha.is_integer() else model.lora_alpha
    stacked = {last[name]: len(parts) for name, parts in pieces.items() if len(parts) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": model.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(source.transposed for parts in pieces.values() for _, _, source in parts),
        "target_modules": sorted(set(last.values())),
        "rank_pattern": {module: number * model.lora_rank for module, number in stacked.items()},
        "alpha_pattern": {module: number * alpha for module, number in stacked.items()},
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
