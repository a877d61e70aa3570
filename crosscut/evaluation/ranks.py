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
"""Function that every rank calls with the model, its source and the prepared value; it must be at module level."""


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Layout, device and precision with which a model is scored; they change a score in its last digits only."""

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    precision: str = "float32"
    """Precision of the weights and the matrix products."""


def with_model(
    place: str, on: Machinery, prepare: Callable[[ModelSource], Any], work: Work[_T]
) -> tuple[ModelSource, _T]:
    """The model's source, and the result of `work` on the first rank.

    Starts the ranks that the layout asks for, or joins the ranks that torchrun started. Before a rank starts (under
    torchrun on the first rank) `find_model` finds the model and `prepare` makes the value that all ranks get. Raises
    the errors of `find_model` and `prepare`, and `ConfigError` or `LayoutError`.
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
