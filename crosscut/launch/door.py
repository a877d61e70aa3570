"""The door to the ranks: every command that computes on ranks goes through `in_ranks`.

| step                               | the command starts the ranks | torchrun started them            |
|------------------------------------|------------------------------|----------------------------------|
| check world size and devices       | before a process starts      | on every rank                    |
| `prepare`: find files, read, check | before a process starts      | on the first rank, others wait   |
| `work(prepared, device)`           | on every rank                | on every rank                    |
| result                             | the first rank's             | on every rank, that rank's own   |

A rank does its work inside a process group. The steps of starting, joining and ending are in `processes`.
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
    """Ranks that a command asks for, checked against the machine.

    Raises `LayoutError` where torchrun started another number of ranks, or where this machine has too few GPUs, and
    `ConfigError` where `device` is cuda and there is none.
    """

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    signals: tuple[int, ...] = REQUESTS
    """Signals that a starting process passes on to its ranks (see `processes.launch`)."""
    joins: bool = True
    """Whether torchrun's ranks are joined. If false, this process starts ranks of its own even under torchrun."""

    def __post_init__(self) -> None:
        if self.are_there and started_world_size() != self.layout.world_size:
            raise LayoutError(world_size_message(self.layout, started_world_size()))
        size = self.layout.world_size
        require_devices(self.device, ranks_on_this_machine(size) if self.joins else size)

    @property
    def are_there(self) -> bool:
        """Whether torchrun started the ranks, and this process is one of them."""
        return self.joins and was_started()


@dataclass(frozen=True)
class Done(Generic[_T]):
    """Result of a command that `prepare` finds to have no work left: no rank starts."""

    result: _T


@dataclass(frozen=True)
class _Failed:
    """Error of `prepare` on the first rank, for all ranks to raise."""

    error: CrosscutError


def in_ranks(ranks: Ranks, work: Callable[[_P, torch.device], _T], *, prepare: Callable[[], _P | Done[_T]]) -> _T:
    """Call `prepare` once and `work(prepared, device)` on every rank; gives the result of the first rank.

    `work` is a function at the top level of a module; the prepared value and the result can be pickled. Under torchrun
    each rank gets the result of its own work.

    A `CrosscutError` of `prepare` is raised before a rank starts, under torchrun on every rank. Otherwise raises what
    `work` raises, and as `processes.launch` where ranks were started.
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
    """Join the ranks until this process ends; gives the value of the first rank's `prepare`, and this rank's device.

    For a program that is not ours, which `in_ranks` cannot call: it starts no ranks, and a process group that is there
    already stays in use. Raises a `CrosscutError` of `prepare` on every rank.
    """
    if was_started():
        share_cores()
    device = choose_device(ranks.device)
    keep_process_group(device)
    return _share_prepared(prepare), device


def _work_in_group(work: Callable[[_P, torch.device], _T], prepared: _P, name: str) -> _T:
    """The work of a rank that `launch` started."""
    device = choose_device(name)
    with process_group(device):
        return work(prepared, device)


def _share_prepared(prepare: Callable[[], _T]) -> _T:
    """The first rank's prepared value, on every rank; the others wait for it."""
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
