"""A model at a place, loaded on all ranks of a layout, and something done with it there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from crosscut.config import Layout, LayoutError
from crosscut.config.model import require_tensor_axis
from crosscut.launch import launch, process_group
from crosscut.launch.processes import (
    choose_device,
    is_first_started,
    joined_rank,
    keep_process_group,
    ranks_on_this_machine,
    require_devices,
    share_cores,
    started_world_size,
    was_started,
)
from crosscut.model import GPT
from crosscut.parallel import make_mesh
from crosscut.parallel.collectives import share_from_first
from crosscut.parallel.mesh import world_size_message
from crosscut.pretrained import ModelSource, find_model

_T = TypeVar("_T")

Work = Callable[[GPT, ModelSource, Any], _T]
"""What every rank does with the model, its source and what was prepared; a function of a module."""


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """On what a model is scored; it changes no score but in the last digits."""

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    precision: str = "float32"
    """Of weights and products."""


def with_model(
    place: str, on: Machinery, prepare: Callable[[ModelSource], Any], work: Work[_T]
) -> tuple[ModelSource, _T]:
    """The model's source, and what `work` came to on the first rank.

    Starts the ranks that the layout asks for, or joins those that torchrun started. Before a rank starts (under
    torchrun on the first rank) the model is looked for and `prepare` says what all ranks get. Raises what both raise,
    and `ConfigError` or `LayoutError`.
    """
    if was_started() and started_world_size() != on.layout.world_size:
        raise LayoutError(world_size_message(on.layout, started_world_size()))
    require_devices(on.device, ranks_on_this_machine(on.layout.world_size))

    def prepared() -> tuple[ModelSource, Any]:
        source = _found(place, on)
        return source, prepare(source)

    if not was_started():
        source, told = prepared()
        return source, launch(_rank, (source, told, on, work), num_ranks=on.layout.world_size)
    with joined_rank(), process_group(choose_device(on.device)):
        # What is newest in a run in progress is for one rank to say.
        source, told = share_from_first(prepared() if is_first_started() else None)
        return source, _do(source, told, on, work)


def joined_model(place: str, on: Machinery) -> tuple[GPT, ModelSource]:
    """The model and its source on the ranks that were started, for a program that is not ours and ends when it likes.

    Every rank calls it. Raises as `with_model`.
    """
    require_devices(on.device, ranks_on_this_machine(on.layout.world_size))
    if was_started():
        share_cores()
    keep_process_group(choose_device(on.device))
    source = share_from_first(_found(place, on) if is_first_started() else None)
    return source.load(make_mesh(on.layout, choose_device(on.device)), precision=on.precision), source


def _found(place: str, on: Machinery) -> ModelSource:
    source = find_model(place)
    require_tensor_axis(source.model, on.layout.tensor)
    return source


def _rank(source: ModelSource, told: Any, on: Machinery, work: Work[_T]) -> _T:
    with process_group(choose_device(on.device)):
        return _do(source, told, on, work)


def _do(source: ModelSource, told: Any, on: Machinery, work: Work[_T]) -> _T:
    model = source.load(make_mesh(on.layout, choose_device(on.device)), precision=on.precision)
    return work(model, source, told)
