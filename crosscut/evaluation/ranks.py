"""A model at a place, loaded on all ranks of a layout, and something done with it there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from crosscut.config import Layout
from crosscut.config.model import require_tensor_axis
from crosscut.launch import Ranks, in_ranks
from crosscut.launch.door import stay_in_ranks
from crosscut.model import GPT
from crosscut.parallel import make_mesh
from crosscut.pretrained import ModelSource, find_model

_T = TypeVar("_T")

Work = Callable[[GPT, ModelSource, Any], _T]
"""Function that every rank calls with the model, its source and the prepared value; it must be at module level."""


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Layout, device and precision with which a model is scored; they change a score in its last digits only."""

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    precision: str = "float32"
    """Precision of the weights and the matrix products."""

    def ranks(self) -> Ranks:
        """The ranks of the layout. Raises `ConfigError` or `LayoutError` as `Ranks`."""
        return Ranks(layout=self.layout, device=self.device)


def with_model(
    place: str, on: Machinery, prepare: Callable[[ModelSource], Any], work: Work[_T]
) -> tuple[ModelSource, _T]:
    """The model's source, and the result of `work` on the first rank.

    The ranks are those of `launch.in_ranks`: `find_model` finds the model and `prepare` makes the value that all ranks
    get before a rank starts, under torchrun on the first rank. Raises the errors of both, and `ConfigError` or
    `LayoutError`.
    """

    def prepared() -> tuple[ModelSource, Any]:
        source = _found(place, on)
        return source, prepare(source)

    return in_ranks(on.ranks(), partial(_with_loaded, on, work), prepare=prepared)


def joined_model(place: str, on: Machinery) -> tuple[GPT, ModelSource]:
    """The model and its source on the ranks that were started, for a program that is not ours and ends when it likes.

    Every rank calls it. Raises as `with_model`.
    """
    source, device = stay_in_ranks(on.ranks(), prepare=lambda: _found(place, on))
    return source.load(make_mesh(on.layout, device), precision=on.precision), source


def _found(place: str, on: Machinery) -> ModelSource:
    source = find_model(place)
    require_tensor_axis(source.model, on.layout.tensor)
    return source


def _with_loaded(
    on: Machinery, work: Work[_T], prepared: tuple[ModelSource, Any], device: torch.device
) -> tuple[ModelSource, _T]:
    source, told = prepared
    model = source.load(make_mesh(on.layout, device), precision=on.precision)
    return source, work(model, source, told)
