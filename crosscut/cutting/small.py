"""Large modules without their memory: their matrices on `meta`, and copies with smaller sizes."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from crosscut.verification.foreign.cuts import Build

_LARGE = 2**20
"""Number of elements from which an uninitialised tensor is made on `meta`."""
SMALL = 2**23
"""Number of parameters of a module that several ranks can train in float64."""


class _LargeOnMeta(TorchFunctionMode):
    """Context in which large tensors without values, as weights are before they are initialised, take no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            shape = options.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if torch.Size(shape).numel() >= _LARGE:
                options["device"] = "meta"
        return func(*args, **options)


def build_lean(build: Build) -> tuple[nn.Module, Mapping[str, Any], Any]:
    """Call `build`, with large weights on `meta` if it can be done."""
    torch.manual_seed(0)
    try:
        with _LargeOnMeta():
            module, inputs, loss = build()
        lacking = [each for each in (*module.buffers(), *tree_leaves(dict(inputs))) if isinstance(each, Tensor) and each.is_meta]
        if not lacking:
            return module, inputs, loss
    except (NotImplementedError, RuntimeError):  # the function reads the values of weights
        pass
    torch.manual_seed(0)
    return build()


@dataclass(frozen=True)
class SmallCopy:
    """Function that builds a module as another function does, but with smaller sizes in its config."""

    build: Build
    changes: tuple[tuple[str, int], ...]
    """New values of the config's fields."""

    def __call__(self) -> tuple[nn.Module, Mapping[str, Any], Any]:
        module, inputs, loss = build_lean(self.build)
        config: Any = copy.deepcopy(module.config)
        layers = {len(each): new for each in module.modules() if isinstance(each, nn.ModuleList) for new in ()}
        for name, value in self.changes:
            setattr(config, name, value)
        small = type(module)(config).train(module.training)
        return small, inputs, loss
