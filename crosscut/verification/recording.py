"""Recording of one training step on one rank: every module's outputs, returned gradients and parameter gradients.

The same recording is made of the uncut model and on every rank of the cut one; only then are they compared. Tensors are
copied to host memory as they pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from crosscut.parallel import ParallelMesh
from crosscut.parallel.linear import is_recomputing
from crosscut.parallel.state.parameters import cut_dim, gathered_over_data
from crosscut.training.speed.compilation import compiled_modules

LOSS = "loss"
"""Name in the table for the computation that follows the model's last output."""

INSIDE = " / "
"""Separator between a call and a tensor that its own code, not one of its modules, made or took."""


def call_of(name: str) -> str:
    """The call to which something recorded belongs."""
    return name.partition(INSIDE)[0].partition("[")[0]


class Kept(NamedTuple):
    """This rank's part of a parameter, or of what belongs to one."""

    tensor: Tensor
    cut_dim: int | None
    """The dimension that is cut over the tensor axis."""


@dataclass
class Recording:
    """One step as one rank saw it. Names are those of `named_modules`; a further call of the same module is counted."""

    root: str = ""
    """Name of the whole model."""
    loss: float = 0.0
    """Loss over all data ranks."""
    norm: float = 0.0
    """The global gradient norm before clipping."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of each call of a module, one of several with its index as in `call[1]`, and inputs that a call's own
    code made for a module inside it; in order of time."""
    returned: dict[str, Tensor] = field(default_factory=dict)
    """The gradient of each call's first input, or of an output that a call's own code took; in the order of the
    backward pass, innermost modules first."""
    gradients: dict[str, Kept] = field(default_factory=dict)
    """Gradient of each parameter, reduced over every axis that it has to be reduced over."""
    clipped: dict[str, Kept] = field(default_factory=dict)
    """The gradients that the optimizer was given."""
    parameters: dict[str, Kept] = field(default_factory=dict)
    """Parameters after the optimizer's step."""

    def with_wholes(self, modules: Sequence[str]) -> "Recording":
        """As if nobody had looked into `modules`, of which only what goes in and comes out is left."""
        insides = tuple(f"{name}{sign}" for name in modules for sign in (".", INSIDE))
        outputs, returned = (
            {name: tensor for name, tensor in seen.items() if not name.startswith(insides)}
            for seen in (self.outputs, self.returned)
        )
        return replace(self, outputs=outputs, returned=returned)


class Step(Protocol):
    """A training step in the two halves between which gradients are looked at."""

    @property
    def model(self) -> nn.Module:
        """Watched through its modules' forward calls."""

    @property
    def mesh(self) -> ParallelMesh:
        """Mesh that the model is cut over."""

    @property
    def watches_again(self) -> bool:
        """Whether what leaves modules is looked at when the whole model is called once more, too."""

    def accumulate(self) -> Tensor:
        """Forward, backward and the reduction of gradients; gives the loss over all data ranks."""

    def update(self, loss: Tensor) -> float:
        """Clip and step; gives the gradient norm before clipping. The clipped gradients stay."""


def record(step: Step) -> Recording:
    """Take the step and write down what it did. Every rank of the step's mesh calls it."""
    recording = Recording(root=display_name(step.model))
    with _watched(step.model, recording, again=step.watches_again):
        loss = step.accumulate()
    recording.loss = float(loss.detach())
    recording.gradients = _gradients(step.model)
    recording.norm = step.update(loss.detach())
    recording.clipped = _gradients(step.model)
    recording.parameters = {name: Kept(_copy(p), cut_dim(p)) for name, p in step.model.named_parameters()}
    return recording


def _gradients(model: nn.Module) -> dict[str, Kept]:
    """A gradient that is missing counts as zeros."""
    kept = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(_copy(parameter)) if parameter.grad is None else _copy(parameter.grad)
        kept[name] = Kept(gradient, cut_dim(parameter))
    return kept


def _copy(tensor: Tensor) -> Tensor:
    """The tensor rank's part, on the host."""
    return gathered_over_data(tensor).cpu()


@contextmanager
def _watched(model: nn.Module, recording: Recording, *, again: bool) -> Iterator[None]:
    """While inside, outputs and returned gradients are written down, of the model's first call or `again` of every one.
    A compiled module is watched as a whole.
    """
    watch = _Watch(recording, again=again)
    handles = []
    insides = tuple(f"{name}." for name in compiled_modules(model))
    for name, module in model.named_modules():
        if name.startswith(insides):
            continue
        enter = partial(watch.enter, name or display_name(model))
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_pre_hook(watch.entered))
        handles.append(module.register_forward_hook(watch.leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        watch.let_go()


def display_name(model: nn.Module) -> str:
    """Name of the whole model."""
    return type(model).__name__.removeprefix("FSDP")  # which a sharded model's class gets


class _Watch:
    """Names the calls of modules and follows the tensors between them. What a backward pass recomputes is no call."""

    def __init__(self, recording: Recording, *, again: bool) -> None:
        self.recording = recording
        self._again, self._seen = again, False
        self._num_calls: dict[str, int] = {}
        self._running: list[str] = []
        self._followed: dict[int, _Followed] = {}
        self._held: list[Tensor] = []
        """Followed tensors and their stand-ins inside calls, kept alive so that no other tensor gets the id of one."""
        self._entering: _Followed | None = None

    def enter(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._looks_away():
            return
        self._num_calls[name] = count = self._num_calls.get(name, 0) + 1
        call = name if count == 1 else f"{name}, call {count}"
        parent = self._running[-1] if self._running else LOSS
        self._running.append(call)
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
            if id(inputs[0]) not in self._followed:  # made by the parent's own code
                self.recording.outputs[f"{parent}{INSIDE}input of {call}"] = inputs[0].detach().cpu().clone()
            self._entering = self._follow(inputs[0], f"{parent}{INSIDE}input of {call}")
            self._entering.consumers.append(call)

    def entered(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """After all that wraps a module's input, as sharding does: what the module sees counts as that input."""
        if self._looks_away():
            return
        if not inputs or not isinstance(inputs[0], Tensor) or not inputs[0].is_floating_point():
            return
        if id(inputs[0]) not in self._followed and self._entering is not None:
            self._followed[id(inputs[0])] = self._entering
            self._held.append(inputs[0])

    def leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if self._looks_away():
            return
        call = self._running.pop()
        self._seen = self._seen or call == self.recording.root
        parent = self._running[-1] if self._running else LOSS
        several = isinstance(output, tuple | list)
        for i, tensor in enumerate(output if several else [output]):
            if not isinstance(tensor, Tensor):
                continue
            name = f"{call}[{i}]" if several else call
            self.recording.outputs[name] = tensor.detach().cpu().clone()
            passed_on = self._follow(tensor, "")
            passed_on.unless_consumed = f"{parent}{INSIDE}output of {name}" if self._running else LOSS

    def _looks_away(self) -> bool:
        return is_recomputing() or (self._seen and not self._again)

    def _follow(self, tensor: Tensor, unless_consumed: str) -> "_Followed":
        """Have the tensor's gradient noted when the backward pass comes to it."""
        found = self._followed.get(id(tensor))
        if found is None:
            found = self._followed[id(tensor)] = _Followed(unless_consumed)
            self._held.append(tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._receive, found))
        return found

    def let_go(self) -> None:
        """Hold no tensor any more: one that its own hook holds would stay for good, and its whole graph with it."""
        self._held.clear()
        self._followed.clear()
        self._entering = None

    def _receive(self, followed: "_Followed", gradient: Tensor) -> None:
        kept = gradient.detach().cpu().clone()
        for name in reversed(followed.consumers or [followed.unless_consumed]):
            self.recording.returned[name] = kept


@dataclass
class _Followed:
    unless_consumed: str
    """The name of its gradient where no module took it in."""
    consumers: list[str] = field(default_factory=list)
    """The calls that took it in, the innermost last."""
