"""Places in a run's own processes at which a fault happens: the n-th call of a function on one rank.

At such a place, the process either meets the benchmark, which then does something from outside (kill, move, fill, ...)
while the process waits, or the process damages its own memory: a flipped bit of a weight, NaN in a gradient, an
allocation that fails. The server of `crosscut.launch` imports this module, so each rank, which is a fork of the server,
looks at the environment variable `FAULTS_PLACE` when it begins.
"""

import functools
import importlib
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "FAULTS_PLACE"
MET, GO = "met", "go"
_LONGEST = 120.0
"""Seconds that a process waits for the benchmark at a place."""


@dataclass(frozen=True)
class Place:
    """The n-th call of a function on one rank."""

    function: str
    """Module and name, such as `crosscut.training.step:Trainer.step`."""
    call: int = 1
    rank: int | None = 0
    """Rank on which the place is; None for the process that starts the ranks."""
    act: str = ""
    """Name of a function of this module that is called with the arguments of the call; empty to meet the benchmark."""
    meets: bool = False
    """Whether the process meets the benchmark before it acts."""
    after: bool = False
    """Whether the place is after the call, not before it."""


def to_environment(place: Place | None, folder: Path) -> dict[str, str]:
    """Environment variable for a run whose processes note their numbers in `folder`, and meet the benchmark there."""
    return {VARIABLE: json.dumps({"folder": str(folder), "place": place and asdict(place)})}


def install(rank: int | None) -> None:
    """Put the place of the environment variable into this process, if the place is on this rank."""
    told = json.loads(os.environ.get(VARIABLE, "null"))
    if told is None:
        return
    folder = Path(told["folder"])
    name = "launcher" if rank is None else f"rank-{rank}"
    (folder / name).write_text(str(os.getpid()), encoding="utf-8")
    place = told["place"] and Place(**told["place"])
    if place is None or place.rank != rank:
        return
    module, _, path = place.function.partition(":")
    *parents, last = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    setattr(owner, last, _counted(getattr(owner, last), place, folder))


def _counted(function: Callable[..., Any], place: Place, folder: Path) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        is_here = calls == place.call
        if is_here and not place.after:
            _happen(place, folder, arguments)
        result = function(*arguments, **more)
        if is_here and place.after:
            _happen(place, folder, arguments)
        return result

    return counted


def _happen(place: Place, folder: Path, arguments: tuple[Any, ...]) -> None:
    """Meet the benchmark, which then lets this process go on, or act."""
    (folder / f".{MET}").write_text(str(os.getpid()), encoding="utf-8")
    (folder / f".{MET}").rename(folder / MET)
    began = time.monotonic()
    while (place.meets or not place.act) and not (folder / GO).exists() and time.monotonic() - began < _LONGEST:
        time.sleep(0.005)
    if place.act:
        globals()[place.act](*arguments)


def flip_bit(trainer: Any, *_: Any) -> None:
    """Flip one bit of a weight of this rank, which every other replica holds unchanged."""
    import torch

    weight = dict(trainer.model.named_parameters())["final_norm.bias"].data
    flat = (weight.to_local() if hasattr(weight, "to_local") else weight).view(-1)
    flat[:1].view(torch.int64 if flat.element_size() == 8 else torch.int32).bitwise_xor_(1 << 20)


def plant_nan(owner: Any, *_: Any) -> None:
    """Make one element of a gradient of this rank NaN. `owner` is a `Trainer` or a `GradientReducer`."""
    grad = next(parameter.grad for parameter in owner.parameters if parameter.grad is not None)
    (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = float("nan")


def replace_gradients(trainer: Any, *_: Any) -> None:
    """Replace the gradients of this rank by noise with 1,000 times their norm."""
    import torch

    from crosscut.parallel.state.parameters import local_part

    generator = torch.Generator().manual_seed(1)
    for parameter in trainer.parameters:
        gradient = local_part(parameter.grad)
        noise = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        gradient.copy_(noise * 1000 * gradient.norm() / noise.norm())


def limit_memory(*_: Any) -> None:
    """Allow this process no more memory than it has, and ask for a tensor that does not fit."""
    import torch

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(1 << 30)


def grow(*_: object) -> None:
    """Take 64 MiB of memory."""
    bytearray(b"1") * (64 << 20)


def _begin_rank() -> None:
    """Wrap the entry of a rank, so that each rank puts the place into itself."""
    from crosscut.launch import processes

    entry = processes._run_rank

    @functools.wraps(entry)
    def run_rank(*arguments: Any) -> Any:
        install(int(os.environ["RANK"]))
        return entry(*arguments)

    processes._run_rank = run_rank


if os.environ.get("FAULTS_SERVER"):
    _begin_rank()
