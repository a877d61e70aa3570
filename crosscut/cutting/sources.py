"""Values of a cut module's parameters: from the uncut module, from a function, or from safetensors files."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from crosscut.config import CheckpointError, ConfigError
from crosscut.cutting.shares import Share
from crosscut.pretrained.tensors import StoredTensor, list_tensors

Load = Callable[[str], Tensor]
"""Function that returns a whole parameter or buffer, given its name."""


class Source:
    """Source of the values of one module. `names` maps the names of tied parameters to one another."""

    def __init__(self, load: Load | Path | None) -> None:
        self._load = load if callable(load) else None
        self._stored: dict[str, StoredTensor] = list_tensors(load) if isinstance(load, Path) else {}
        self._folder = load if isinstance(load, Path) else None

    def require(self, names: list[str], like: Tensor) -> None:
        """Raise `ConfigError` or `CheckpointError` unless the tensor with these names can be read."""
        if not like.is_meta or self._load is not None:
            return
        if self._folder is None:
            raise ConfigError(
                f"`{names[0]}` must have values, but is on the device meta. Give `load`, a function that returns the "
                "value of a name or a folder of safetensors files, or make the tensor on another device."
            )
        stored = self._find(names)
        if stored is None or tuple(stored.shape) != tuple(like.shape):
            found = "has none of this name" if stored is None else f"has one of shape {tuple(stored.shape)}"
            raise CheckpointError(
                f"`{self._folder}` must hold a tensor `{names[0]}` of shape {tuple(like.shape)}, but {found}. Load the "
                "files of this model, or make the tensor on another device than meta."
            )

    def part(self, names: list[str], like: Tensor, share: Share, rank: int) -> Tensor:
        """Return the part of a tensor that a rank holds, in the type of `like`. The names are those of one parameter,
        which may be tied.
        """
        if not like.is_meta:
            return taken(like.detach(), share, rank, shares_memory=True)
        if self._load is None:
            stored = self._find(names)
            assert stored is not None
            return _read(stored, share, rank).to(like.dtype)
        loaded = self._load(names[0])
        if loaded.shape != like.shape:
            raise ConfigError(
                f"`load` must return a tensor of shape {tuple(like.shape)} for `{names[0]}`, but returned one of shape "
                f"{tuple(loaded.shape)}. Load the weights of this model."
            )
        return taken(loaded.detach(), share, rank).to(like.dtype)

    def _find(self, names: list[str]) -> StoredTensor | None:
        return next((self._stored[name] for name in names if name in self._stored), None)


def taken(whole: Tensor, share: Share, rank: int, *, shares_memory: bool = False) -> Tensor:
    """Return the part of a whole tensor that a rank holds. A part does not share memory with the whole tensor."""
    if share.is_whole:
        return whole if shares_memory else whole.clone()
    return torch.cat([whole.narrow(share.dim, start, stop - start) for start, stop in share.spans[rank]], share.dim)


def _read(stored: StoredTensor, share: Share, rank: int) -> Tensor:
    """Read the part of a stored tensor that a rank holds."""
    from safetensors import safe_open  # imported only when such a file is read

    with safe_open(stored.path, framework="pt") as file:
        if share.is_whole:
            tensor: Tensor = file.get_tensor(stored.name)
            return tensor
        view, before = file.get_slice(stored.name), (slice(None),) * share.dim
        return torch.cat([view[(*before, slice(*span))] for span in share.spans[rank]], share.dim)
