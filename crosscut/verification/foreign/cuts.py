"""Proof that a cut module computes the same as the uncut module, whoever has cut it."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.launch import Ranks, in_ranks
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.state.parameters import is_distributed, whole
from crosscut.verification.assembly import Place
from crosscut.verification.foreign.limits import SECONDS, Limits
from crosscut.verification.foreign.wide import disturb_constants, in_float64, to_float64
from crosscut.verification.module import CLIP_NORM, ModuleStep, adamw_step, require_parameters, tell_messages
from crosscut.verification.proof import Claim, prove
from crosscut.verification.recording import ParameterShard, ShardOf
from crosscut.verification.report import LayoutReport
from crosscut.verification.watching import display_name

Build = Callable[[], tuple[nn.Module, Mapping[str, Any], Callable[[Any], Tensor]]]
"""Function that returns the uncut module, its keyword inputs, and a function that makes a scalar loss of its output."""
Cut = Callable[[nn.Module, ParallelMesh], nn.Module | None]
"""Function that cuts a module on this rank. Returns the cut module, or None if the module was changed in place."""
Gather = Callable[[str, ParallelMesh], Place | None]
"""Function that returns the place of this rank's part of a plain parameter in the whole parameter, given the name of
the parameter: `whole[place]` is the part. None means that every rank holds the whole parameter.
"""
Step = Callable[[nn.Module], float]
"""Function that clips the gradients of the cut module and runs the optimizer's step. Returns the gradient norm before
clipping.
"""

_SEED = 0


@dataclass(frozen=True)
class ForeignCut:
    """Module, and a function that cuts it."""

    build: Build
    cut: Cut
    gather: Gather | None = None
    step: Step | None = None

    def require_importable(self) -> None:
        """Raise `ConfigError` if a function cannot be sent to the ranks."""
        for name, function in vars(self).items():
            if function is not None and not _is_importable(function):
                raise ConfigError(
                    f"`{name}` must be a function at the top of a module, because the ranks import it by its name, but "
                    f"is `{getattr(function, '__qualname__', function)}`. Move the function to the top of a module."
                )


def prove_module(
    build: Build,
    cut: Cut,
    layout: Layout,
    *,
    gather: Gather | None = None,
    step: Step | None = None,
    seconds: float = SECONDS,
) -> LayoutReport:
    """Compare a training step of a module that `cut` has cut with the same step of the uncut module. The ranks of
    `layout` are tensor ranks, or context ranks that share images. They run on the CPUs of this machine, with gloo, and
    compute in float64.

    `build()` returns the uncut module, its keyword inputs, and a function that makes a scalar loss of its output. The
    random generator is seeded before each call. Parameters whose elements are all equal are disturbed. The gradients of
    inputs that require one are compared, too. `cut(module, mesh)` changes the module in place, or returns another
    module whose modules and parameters have the same names. `mesh.tensor.device_mesh` is the `DeviceMesh` of the ranks.
    Every rank gets the same whole inputs. Distributed parameters (`DTensor`) are gathered. If their parts, joined, are
    in another order than in the uncut module, their module has a method `in_uncut_order(name, gathered)`, which returns
    the gathered parameter, or its gradient, in the uncut order. A module may have a method `uncut_columns()`, which
    returns the columns of the uncut output that each rank returns, and a tensor `uncut_places()`, which returns the
    places of the ranks' parts in the uncut tensor. Other outputs are joined by their shapes; on context ranks, they are
    copies. Plain parameters are copies unless `gather(name, mesh)` returns the place of the rank's part.

    `step(module)` clips the gradients, runs an optimizer's step and returns the gradient norm; without it,
    `torch.nn.utils.get_total_norm` measures the norm, and `torch.optim.AdamW` takes the step. The first rank also calls
    `step` for the uncut module, alone: for a module without parts, the function must send nothing. All functions must
    be at the top of a module, and run with your rights, at most for `seconds`.

    Raises `ConfigError` or `LayoutError` before a rank starts for functions that cannot be imported and for a layout
    with other ranks, `ConfigError` for a module that cannot be compared, `TrainingError` if the time ends or the uncut
    step is not finite, and `RankFailure` if a rank fails.
    """
    foreign = ForeignCut(build, cut, gather, step)
    require_sharing_ranks(layout)
    foreign.require_importable()
    limits = Limits.on(layout.world_size, seconds)
    return in_ranks(Ranks(layout=layout, device="cpu"), _prove, prepare=lambda: (foreign, layout, limits))


def _is_importable(function: Callable[..., object]) -> bool:
    """Whether a rank finds a function, or the class of a callable object, by its name."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    found: object = sys.modules.get(named.__module__)
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is named


def require_sharing_ranks(layout: Layout) -> None:
    """Raise `LayoutError` unless a layout has several tensor ranks, or several context ranks that share images, and no
    other ranks.
    """
    if max(layout.tensor, layout.context) < 2 or layout.world_size > max(layout.tensor, layout.context):
        raise LayoutError(
            "The layout of a foreign cut must have at least 2 tensor ranks, or 2 context ranks for images, and no "
            f"other ranks, but is {layout}. Give a layout such as tensor=2."
        )


def _prove(told: tuple[ForeignCut, Layout, Limits], device: torch.device) -> LayoutReport:
    foreign, layout, limits = told
    with limits.kept():
        return prove_on_mesh(foreign, make_mesh(layout, device))


def prove_on_mesh(foreign: ForeignCut, mesh: ParallelMesh) -> LayoutReport:
    """Prove a cut on existing ranks, without limits on time and memory. Every rank must call this function, and every
    rank gets the report. See `prove_module`.
    """
    built = Built.of(foreign)
    claim = Claim(
        make_step=lambda on: _cut_step(foreign, built, on),
        make_uncut=lambda on: _uncut_step(foreign, built, on),
        runs_uncut_first=True,
        extra_checks=tell_messages,
        amplification=_amplification(foreign, built),
        layout=str(mesh.layout),
        model=f"{display_name(built.module)} ({built.num_parameters:,} parameters)",
    )
    return prove(claim, mesh)


def _amplification(foreign: ForeignCut, built: "Built") -> dict[str, float]:
    """Return the factor by which `adamw_step` may enlarge the difference of a gradient, for each parameter. A gradient
    of at most `CLIP_NORM` is divided by at least `CLIP_NORM / num_parameters**0.5`.
    """
    if foreign.step is not None:
        return {}
    return dict.fromkeys((name for name, _ in built.module.named_parameters()), built.num_parameters**0.5)


class Built(NamedTuple):
    """Values that `build` returned, in float64."""

    module: nn.Module
    inputs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    num_parameters: int
    """Number of the uncut module's parameters."""
    step: Step | None

    @classmethod
    def of(cls, foreign: ForeignCut) -> "Built":
        """Call `build`. Raises `ConfigError` if it returns something else."""
        torch.manual_seed(_SEED)
        made: object = foreign.build()
        match made:
            case (nn.Module() as module, Mapping() as inputs, loss) if callable(loss):
                require_parameters(module)
            case _:
                kinds = ", ".join(type(each).__name__ for each in (made if isinstance(made, tuple) else [made]))
                raise ConfigError(
                    "`build` must return a module, a mapping of its keyword inputs and a function that makes a loss of "
                    f"its output, but returned ({kinds}). Return the three as a tuple."
                )
        disturb_constants(module.double())
        number = sum(parameter.numel() for parameter in module.parameters())
        return cls(module, to_float64(inputs), loss, number, foreign.step)


def _uncut_step(foreign: ForeignCut, built: Built, mesh: ParallelMesh) -> ModuleStep:
    """Return the step of a second module, which nobody cuts. Raises `ConfigError` if `build` returns the same one."""
    again = Built.of(foreign)
    held = {id(parameter) for parameter in built.module.parameters()}
    if any(id(parameter) in held for parameter in again.module.parameters()):
        raise ConfigError(
            "`build` must make a new module at each call, but returned parameters that it had returned before. Make "
            "the module inside the function."
        )
    return _step(again, mesh, lambda _, tensor: ParameterShard.of_any(tensor), is_cut=False)


def _cut_step(foreign: ForeignCut, built: Built, mesh: ParallelMesh) -> ModuleStep:
    """Cut the module and return its step."""
    names, title = [name for name, _ in built.module.named_parameters()], display_name(built.module)
    cut = foreign.cut(built.module, mesh)
    module = built.module if cut is None else cut
    if lacking := sorted({*names} ^ {name for name, _ in module.named_parameters()}):
        raise ConfigError(
            f"`cut` must keep the names of all parameters, but `{lacking[0]}` is in only one of the two modules. Cut "
            "the parameter under its own name."
        )
    if display_name(module) != title:  # the report compares modules by name
        module.__class__ = type(title, (type(module),), {})

    def shard_of(name: str, tensor: Tensor) -> ParameterShard:
        place = None if foreign.gather is None or is_distributed(tensor) else foreign.gather(name, mesh)
        shard = ParameterShard.of_any(tensor, place or ())
        owner, _, key = name.rpartition(".")
        ordered = getattr(module.get_submodule(owner), "in_uncut_order", None)
        return shard if ordered is None else shard._replace(tensor=ordered(key, shard.tensor))

    return _step(built._replace(module=module), mesh, shard_of, is_cut=True)


def _step(built: Built, mesh: ParallelMesh, shard_of: ShardOf, *, is_cut: bool) -> ModuleStep:
    """Return the step of a module. Its random draws begin from the present state of the generator, which `cut` may have
    set.
    """
    module, state = built.module, torch.get_rng_state()

    def passes() -> Tensor:
        torch.set_rng_state(state)
        with in_float64():
            loss = built.loss(module(**built.inputs))
            if not isinstance(loss, Tensor) or loss.dim():
                told = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ConfigError(f"The loss must be a scalar tensor, but is {told}. Return a sum or a mean.")
            loss.backward()
        return whole(loss.detach()) if is_distributed(loss) else loss.detach()

    def finish() -> float:
        if built.step is not None:
            return float(built.step(module))
        norm = _clip(module)
        adamw_step(module, built.num_parameters)
        return norm

    is_copied = mesh.context.size > 1
    return ModuleStep(
        module, mesh, passes=passes, finish=finish, shard_of=shard_of, may_fail=is_cut, is_copied=is_copied
    )


def _clip(module: nn.Module) -> float:
    """Clip the gradients to `CLIP_NORM` by the norm that PyTorch finds. Returns the norm before clipping. PyTorch's own
    function accepts only gradients of one kind: plain tensors, or tensors that are distributed over one mesh.
    """
    kinds: dict[object, list[Tensor]] = {}
    for parameter in module.parameters():
        if (gradient := parameter.grad) is not None:
            kinds.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(gradients) for gradients in kinds.values()]
    norm = math.hypot(*(float(whole(each) if is_distributed(each) else each) for each in norms))
    for gradients in kinds.values():
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP_NORM / (norm + 1e-6)))
    return norm
