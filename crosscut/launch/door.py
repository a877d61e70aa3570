"""Entry to the ranks: every command that computes on ranks calls `in_ranks`.

| step                               | the command starts the ranks | torchrun started the ranks           |
|------------------------------------|------------------------------|--------------------------------------|
| check world size and devices       | before a process starts      | on every rank                        |
| `prepare`: find files, read, check | before a process starts      | on the first rank; the others wait   |
| `work(prepared, device)`           | on every rank                | on every rank                        |
| returned result                    | the first rank's             | on each rank, its own                |

A rank does its work inside a process group. `processes` contains the steps of starting, joining and ending.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from crosscut.config import CrosscutError, Layout, LayoutError
from crosscut.launch.processes import (
    choose_device,
    is_first_started,
    joined_rank,
    keep_process_group,
    launch,
    process_group,
    ranks_on_this_machine,
    require_devices,
    share_cores,
    started_world_size,
    was_started,
)
from crosscut.launch.stopping import REQUESTS
from crosscut.parallel.collectives import share_from_first
from crosscut.parallel.mesh import world_size_message

_P = TypeVar("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that a command needs, checked against this machine.

    Raises `LayoutError` if torchrun started a different number of ranks or this machine has too few GPUs, and
    `ConfigError` if `device` is cuda and there is no GPU.
    """

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`, which means cuda if there is a GPU."""
    signals: tuple[int, ...] = REQUESTS
    """Signals that the starting process passes on to its ranks (see `processes.launch`)."""
    joins: bool = True
    """Whether to join ranks that torchrun started. If false, this process starts ranks of its own even under
    torchrun.
    """

    def __post_init__(self) -> None:
        if self.are_there and started_world_size() != self.layout.world_size:
            raise LayoutError(world_size_message(self.layout, started_world_size()))
        size = self.layout.world_size
        require_devices(self.device, ranks_on_this_machine(size) if self.joins else size)

    @property
    def are_there(self) -> bool:
        """Whether torchrun started the ranks and this process is one of them."""
        return self.joins and was_started()


@dataclass(frozen=True)
class Done(Generic[_T]):
    """Result of a command if `prepare` finds that there is no work left. No rank starts."""

    result: _T


@dataclass(frozen=True)
class _Failed:
    """Error of `prepare` on the first rank, to be raised on all ranks."""

    error: CrosscutError


def in_ranks(ranks: Ranks, work: Callable[[_P, torch.device], _T], *, prepare: Callable[[], _P | Done[_T]]) -> _T:
    """Call `prepare` once and `work(prepared, device)` on every rank, and return the first rank's result.

    Under torchrun, each rank returns its own result. `work` must be a function at module level; the prepared value and
    the result must be picklable.

    A `CrosscutError` of `prepare` is raised before a rank starts; under torchrun it is raised on every rank. Otherwise
    raises the errors of `work` and, if this process started the ranks, those of `processes.launch`.
    """
    if ranks.are_there:
        with joined_rank(), process_group(choose_device(ranks.device)):
            prepared = _share_prepared(prepare)
            if isinstance(prepared, Done):
                return prepared.result
            return work(prepared, choose_device(ranks.device))
    prepared = prepare()
    if isinstance(prepared, Done):
        return prepared.result
    arguments = work, prepared, ranks.device
    result: _T = launch(_work_in_group, arguments, num_ranks=ranks.layout.world_size, signals=ranks.signals)
    return result


def stay_in_ranks(ranks: Ranks, *, prepare: Callable[[], _P]) -> tuple[_P, torch.device]:
    """Join the ranks until this process ends. Returns the value of the first rank's `prepare`, and this rank's device.

    Use this in a program that Crosscut does not control and that `in_ranks` therefore cannot call. No ranks are
    started, and an existing process group is used. A `CrosscutError` of `prepare` is raised on every rank.
    """
    if was_started():
        share_cores()
    device = choose_device(ranks.device)
    keep_process_group(device)
    return _share_prepared(prepare), device


def _work_in_group(work: Callable[[_P, torch.device], _T], prepared: _P, name: str) -> _T:
    """Run `work` in a process group on a rank that `launch` started."""
    device = choose_device(name)
    with process_group(device):
        return work(prepared, device)


def _share_prepared(prepare: Callable[[], _T]) -> _T:
    """Return the first rank's prepared value on every rank. The other ranks wait for it."""
    outcome: Any = None
    if is_first_started():
        try:
            outcome = prepare()
        except CrosscutError as error:
            outcome = _Failed(error)
    outcome = share_from_first(outcome)
    if isinstance(outcome, _Failed):
        outcome.error.is_told = not is_first_started()
        raise outcome.error
    prepared: _T = outcome
    return prepared
