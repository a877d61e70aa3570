"""Load a model on all ranks of a layout, and call a function with this model on every rank."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from crosscut.architecture import Ability
from crosscut.config import Layout
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.launch import Ranks, in_ranks
from crosscut.launch.door import stay_in_ranks
from crosscut.model import GPT
from crosscut.parallel import make_mesh
from crosscut.pretrained import ModelSource, find_model

_T = TypeVar("_T")
_P = TypeVar("_P")

Work = Callable[[GPT, ModelSource, _P], _T]
"""Function that every rank calls with the model, its source and the prepared value. The function must be defined at
module level (or be a `partial` of one that is), because it is sent to other processes.
"""


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Layout, device, precision and weights with which a model is scored. The layout and the device change only the
    last digits of a score.
    """

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    precision: str = "float32"
    """Precision of the weights and the matrix products."""
    last_weights: bool = False
    """Whether to score the weights of the last step, even if the checkpoint also holds a moving average."""
    adapter: str = ""
    """Folder of an adapter that is merged into the model; empty for none."""

    def ranks(self) -> Ranks:
        """Return the ranks of the layout. Raises the same `ConfigError` or `LayoutError` as `Ranks`."""
        return Ranks(layout=self.layout, device=self.device)

    def find(self, place: str | Path) -> ModelSource:
        """Find the model at `place`. Raises the errors of `find_model`."""
        return find_model(place, last_weights=self.last_weights, adapter=self.adapter)

    def load(self, source: ModelSource, device: torch.device) -> GPT:
        """Load a model on one rank. Every rank must call this."""
        return source.load(make_mesh(self.layout, device), precision=self.precision)


def with_model(
    on: Machinery, prepare: Callable[[], tuple[ModelSource, _P]], work: Work[_P, _T]
) -> tuple[ModelSource, _T]:
    """Load a model on all ranks and call `work` on every rank. Returns the model's source and the first rank's result.

    Before a rank starts (under torchrun: on the first rank), `prepare` finds the model, and makes the value that every
    rank receives (see `launch.in_ranks`). Raises the errors of `prepare`, and `ConfigError` or `LayoutError`.
    """
    return in_ranks(on.ranks(), partial(_with_loaded, on, work), prepare=prepare)


def joined_model(place: str, on: Machinery) -> tuple[GPT, ModelSource]:
    """Load the model at `place` on ranks that have already been started. Returns the model and its source.

    Use this in a program that Crosscut does not control, such as lm-eval. Every rank must call this. Raises the errors
    of `find_model`, and `ConfigError` or `LayoutError`.
    """
    found, device = stay_in_ranks(on.ranks(), prepare=lambda: find_scored(place, on).to_json())
    source = ModelSource.from_json(found)
    return on.load(source, device), source


def find_scored(place: str, on: Machinery, *others: Ability) -> ModelSource:
    """Find the model at `place`, and check that it can be scored on the layout of `on`. The model must predict the next
    token, or have one of the abilities `others`. Raises the errors of `find_model`, and `ConfigError` or `LayoutError`.
    """
    source = on.find(place)
    if source.abilities.isdisjoint(others):
        source.require_decoder(place)
    require_tensor_axis(source.model, on.layout.tensor)
    return source


def _with_loaded(
    on: Machinery, work: Work[_P, _T], prepared: tuple[ModelSource, _P], device: torch.device
) -> tuple[ModelSource, _T]:
    source, told = prepared
    return source, work(on.load(source, device), source, told)
