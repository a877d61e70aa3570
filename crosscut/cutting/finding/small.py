"""Large modules without their memory: their matrices on `meta`, and copies with smaller sizes."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from crosscut.verification.foreign.cuts import Build

_LARGE = 2**20
"""Number of elements from which a tensor without values is made on `meta`."""
SMALL = 2**23
"""Number of parameters of a module that several ranks can train in float64."""
_LAYERS, _ROWS = 2, 1024
"""Numbers of layers, and of rows of an embedding, of a smaller copy."""
_FACTORS, _LEAST = (32, 16, 8, 4, 2), 8
"""Factors by which sizes are divided, the largest first, and the least size that is left."""


class _LargeOnMeta(TorchFunctionMode):
    """Context in which large tensors without values, as weights are before they are initialised, take no memory."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with `meta` as its device if it makes such a tensor."""
        options = dict(kwargs or {})
        if func is torch.empty:
            shape = options.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if torch.Size(shape).numel() >= _LARGE:
                options["device"] = "meta"
        return func(*args, **options)


def build_lean(build: Build) -> tuple[nn.Module, Mapping[str, object], Any]:
    """Call `build`, with large weights on `meta` unless the function reads their values."""
    torch.manual_seed(0)
    try:
        with _LargeOnMeta():
            module, inputs, loss = build()
        needed = (*module.buffers(), *tree_leaves(dict(inputs)))
        if not any(each.is_meta for each in needed if isinstance(each, Tensor)):
            return module, inputs, loss
    except (NotImplementedError, RuntimeError):
        pass
    torch.manual_seed(0)
    return build()


@dataclass(frozen=True)
class SmallCopy:
    """Function that builds a module as another function does, but with smaller sizes in its config."""

    build: Build
    changes: tuple[tuple[str, object], ...]
    """New values of the config's fields."""

    def __call__(self) -> tuple[nn.Module, Mapping[str, object], Any]:
        """Return the smaller module, its inputs and its loss."""
        module, inputs, loss = build_lean(self.build)
        torch.manual_seed(0)
        small = _with_config(module, self.changes).train(module.training)
        return small, tree_map_only(Tensor, self._within, dict(inputs)), loss

    def _within(self, value: Tensor) -> Tensor:
        """Ids of a smaller vocabulary."""
        is_ids = not value.is_floating_point() and value.dtype != torch.bool
        return value % _ROWS if is_ids and _ROWS in dict(self.changes).values() else value


def small_copies(build: Build, module: nn.Module) -> Iterator[SmallCopy]:
    """Functions that build smaller copies of a module, the smallest first. None for a module without a `config`."""
    fields: dict[str, Any] = dict(getattr(getattr(module, "config", None), "__dict__", {}))
    rows = {each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)}
    sizes = {size for each in module.parameters() for size in each.shape[1:]}
    layers = _fewer_layers(module, fields)
    for factor in _FACTORS:
        changes = dict(layers)
        for name, value in fields.items():
            if type(value) is not int or name in layers:
                continue
            if value in sizes and value % factor == 0 and value // factor >= _LEAST:
                changes[name] = value // factor
            elif value > _ROWS and value in rows:
                changes[name] = _ROWS
            elif _ROWS <= value < max(rows, default=0) and value not in sizes:
                changes[name] = value % _ROWS  # id of a word
        small = _try_config(module, changes)
        if changes and small is not None and sum(each.numel() for each in small.parameters()) <= SMALL:
            yield SmallCopy(build, tuple(changes.items()))


def _fewer_layers(module: nn.Module, fields: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a config that say how many layers there are, and lists with one item for each layer."""
    depths = {len(each) for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) > _LAYERS}
    found: dict[str, object] = {}
    for name, depth in fields.items():
        if type(depth) is int and depth in depths:
            items = {
                key: each[:_LAYERS] for key, each in fields.items() if isinstance(each, list) and len(each) == depth
            }
            small = _try_config(module, {name: _LAYERS, **items})
            if small is not None and len([*small.modules()]) < len([*module.modules()]):
                found |= {name: _LAYERS, **items}
    return found


def _try_config(module: nn.Module, changes: Mapping[str, object]) -> nn.Module | None:
    try:
        with _LargeOnMeta():
            return _with_config(module, tuple(changes.items()))
    except Exception:  # whatever the module raises on sizes that do not fit is an answer
        return None


def _with_config(module: nn.Module, changes: tuple[tuple[str, object], ...]) -> nn.Module:
    config: Any = copy.deepcopy(module.config)
    for name, value in changes:
        vars(config)[name] = value
    kind: Any = type(module)
    made: nn.Module = kind(config)
    return made
