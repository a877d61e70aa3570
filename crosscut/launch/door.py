"""Start of a command's work on ranks. Every command that computes on ranks calls `in_ranks`.

The command starts the ranks itself, unless torchrun has already started them:

| step                               | ranks started by the command | ranks started by torchrun               |
|------------------------------------|------------------------------|-----------------------------------------|
| check world size and devices       | before any rank starts       | on every rank                           |
| `prepare`: find files, read, check | before any rank starts       | on the first rank; the other ranks wait |
| `work(prepared, device)`           | on every rank                | on every rank                           |
| value that `in_ranks` returns      | result of the first rank     | on each rank, the result of this rank   |

Each rank does its work inside a process group. The module `processes` starts, joins and ends the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from crosscut.config import CrosscutError, Layout, LayoutError, errors
from crosscut.config.system.machine import available_cores, require_room
from crosscut.config.system.terminal import echo
from crosscut.config.system.wording import counted
from crosscut.launch.idle import is_idle, told_of_the_end, wait_as_idle
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
from crosscut.launch.restarts import require_new_store
from crosscut.launch.server import start_server
from crosscut.launch.stopping import REQUESTS
from crosscut.parallel.collectives import share_from_first, share_json_from_first
from crosscut.parallel.mesh import world_size_message

_RANKS_PER_CORE = 4
"""Number of ranks per core up to which nothing is said: a proof or a first look at a layout takes seconds then."""

_FEWER = "Choose a smaller layout, or use several machines with torchrun."

_P = TypeVar("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Layout and device of the ranks that a command needs. The constructor checks that this machine can provide the
    layout and the device.

    Raises `LayoutError` in three cases: torchrun started a different number of ranks than the layout needs, the ranks
    could not find each other after a restart by torchrun (`restarts.require_new_store`), or this machine has too few
    GPUs or cores, or too little memory, for the ranks. Raises `ConfigError` if `device` is cuda and this machine has no
    GPU.
    """

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`, which means cuda if there is a GPU."""
    signals: tuple[int, ...] = REQUESTS
    """Signals that the command passes on to the ranks that it started (see `processes.launch`)."""
    joins: bool = True
    """Whether to join the ranks that torchrun started, if there are any. If false, this process always starts its own
    ranks.
    """
    may_idle: bool = False
    """Whether torchrun may have started more ranks than the layout needs. The ranks with the highest numbers are then
    idle (see the module `idle`).
    """

    def __post_init__(self) -> None:
        size, started = self.layout.world_size, started_world_size()
        if self.are_there and (started < size or (started > size and not self.may_idle)):
            raise LayoutError(world_size_message(self.layout, started))
        if self.are_there:
            require_new_store()
        else:
            require_room(self.layout.names_of_axes, size, remedy=_FEWER, error=LayoutError)
        here = ranks_on_this_machine(size) if self.joins else size
        require_devices(self.device, here, self.layout.names_of_axes)

    @property
    def are_there(self) -> bool:
        """Whether the ranks already exist: torchrun started this process as one of them, and `joins` is true."""
        return self.joins and was_started()


@dataclass(frozen=True)
class Done(Generic[_T]):
    """Return value of `prepare` if there is no work to do. `in_ranks` then returns `result` without calling `work`."""

    result: _T


@dataclass(frozen=True)
class _Failed:
    """Error of `prepare` on the first rank, to be raised on all ranks."""

    error: CrosscutError


def _note_crowd(ranks: Ranks) -> None:
    """Say so if many ranks are about to share the cores of this machine."""
    number, cores = ranks.layout.world_size, available_cores()
    if choose_device(ranks.device).type == "cpu" and number > _RANKS_PER_CORE * cores:
        echo(
            f"{number} ranks share {counted(cores, 'core')} of this machine, so a step takes at least "
            f"{number // cores} times as long as with a core for each rank. To use several machines, start the ranks "
            "with torchrun (docs/cluster.md).",
            err=True,
        )


def in_ranks(
    ranks: Ranks,
    work: Callable[[_P, torch.device], _T],
    *,
    prepare: Callable[[], _P | Done[_T]],
    beforehand: Callable[[], None] = lambda: None,
    is_plain: bool = False,
) -> _T:
    """Call `prepare` once and `work(prepared, device)` on every rank, and return the first rank's result.

    `prepared` is the value that `prepare` returns. If this value is a `Done`, `work` is not called. Under torchrun,
    each rank returns the result of its own `work`. `work` must be a function at module level. The prepared value and
    the result must be picklable. With `is_plain`, the prepared value must be JSON, and ranks that torchrun started
    receive it as JSON. A command that accepts network connections sets `is_plain`, because a pickled message can run
    code.

    `beforehand` is called before `prepare`. Under torchrun, it is called on every rank, inside the process group.
    Without torchrun, it is called once, in this process.

    If `prepare` raises a `CrosscutError`, this function raises the error without starting a rank. Under torchrun, the
    error is raised on every rank. If `work` fails, the errors are those of `processes.launch` or, under torchrun, of
    `processes.joined_rank`. On an idle rank (`Ranks.may_idle`), this function does not return: it waits until the other
    ranks have ended, and then ends the process.
    """
    if ranks.are_there:
        return _in_started_ranks(ranks, work, prepare=prepare, beforehand=beforehand, is_plain=is_plain)
    _note_crowd(ranks)
    if ranks.layout.world_size > 1:
        start_server([_module_of(work)])  # the server imports modules while this process calls `prepare`
    beforehand()
    prepared = prepare()
    if isinstance(prepared, Done):
        return prepared.result
    arguments = work, prepared, ranks.device
    result: _T = launch(_work_in_group, arguments, num_ranks=ranks.layout.world_size, signals=ranks.signals)
    return result


def _in_started_ranks(
    ranks: Ranks,
    work: Callable[[_P, torch.device], _T],
    *,
    prepare: Callable[[], _P | Done[_T]],
    beforehand: Callable[[], None],
    is_plain: bool,
) -> _T:
    """Do the work of `in_ranks` on a rank that torchrun started."""
    size, device = ranks.layout.world_size, choose_device(ranks.device)
    if is_idle(size):
        wait_as_idle()
    with joined_rank(), process_group(device, size), told_of_the_end(size):
        beforehand()
        prepared = _share_prepared(prepare, is_plain=is_plain)
        return prepared.result if isinstance(prepared, Done) else work(prepared, device)


def stay_in_ranks(ranks: Ranks, *, prepare: Callable[[], _P]) -> tuple[_P, torch.device]:
    """Make this process one of the ranks until the process ends. Returns the first rank's result of `prepare`, which
    must be a JSON value, and this rank's device.

    `prepare` runs on the first rank only. If `prepare` raises a `CrosscutError`, the error is raised on every rank.
    This function starts no ranks. If a process group exists, the function uses that group.

    Use this function in a program that Crosscut does not control, such as lm-eval. The work of such a program cannot be
    passed to `in_ranks` as a function.
    """
    if was_started():
        share_cores()
    device = choose_device(ranks.device)
    keep_process_group(device)
    return _share_prepared(prepare, is_plain=True), device


def _work_in_group(work: Callable[[_P, torch.device], _T], prepared: _P, name: str) -> _T:
    """Run `work` in a process group on a rank that `launch` started."""
    device = choose_device(name)
    with process_group(device):
        return work(prepared, device)


def _module_of(work: Callable[..., object]) -> str:
    """Return the name of the module that defines `work`, so that a process can import it. `work` may be a
    `functools.partial`.
    """
    while isinstance(work, partial):
        work = work.func
    return work.__module__


def _share_prepared(prepare: Callable[[], _T], *, is_plain: bool) -> _T:
    """Call `prepare` on the first rank and return the result on every rank. The other ranks wait for the first rank."""
    outcome: Any = None
    if is_first_started():
        try:
            outcome = prepare()
        except CrosscutError as error:
            outcome = _Failed(error)
    outcome = _share_plain(outcome) if is_plain else share_from_first(outcome)
    if isinstance(outcome, _Failed):
        outcome.error.is_told = not is_first_started()
        raise outcome.error
    prepared: _T = outcome
    return prepared


def _share_plain(outcome: object) -> object:
    """Send the first rank's value or error to every rank as JSON, and return it on every rank."""
    error = outcome.error if isinstance(outcome, _Failed) else None
    told = {"kind": type(error).__name__, "text": str(error)} if error else {"value": outcome}
    told = share_json_from_first(told)
    return told["value"] if "value" in told else _Failed(getattr(errors, told["kind"])(told["text"]))
