"""Recording of one training step on one rank: outputs, returned gradients and parameter gradients of every module.

The uncut model and every rank of the cut model are recorded in the same way and compared afterwards. Tensors are copied
to host memory during the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from crosscut.model import GPT
from crosscut.parallel import ParallelMesh
from crosscut.parallel.linear import is_recomputing
from crosscut.parallel.state.parameters import cut_dim, gathered_over_data
from crosscut.training.speed.compilation import compiled_modules

LOSS = "loss"
"""Name that the report's table gives to the computation after the model's last output."""

INSIDE = " / "
"""Separator in the names of tensors that a module's own code makes or uses, as opposed to the code of its submodules.
The text before the separator names the module and, if the module is called several times, the number of the call.
"""


def call_of(name: str) -> str:
    """Return the name of the module call that a recorded tensor belongs to, given the tensor's name."""
    return name.partition(INSIDE)[0].partition("[")[0]


class Kept(NamedTuple):
    """This rank's shard of a parameter, or of a parameter's gradient."""

    tensor: Tensor
    cut_dim: int | None
    """Dimension that is sharded over the tensor axis; None if the parameter is replicated."""


@dataclass
class Recording:
    """Recording of one step on one rank. Names come from `named_modules`. If a module is called again, the call's name
    has a number, such as `dropout, call 2`.
    """

    root: str = ""
    """Name of the whole model."""
    loss: float = 0.0
    """Loss over all data ranks."""
    norm: float = 0.0
    """Global gradient norm before clipping."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of each module call, in chronological order. If a call returns several tensors, their names are
    `call[0]`, `call[1]` and so on. If a module's own code makes the input of a submodule, this input is also recorded.
    """
    returned: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that the backward pass returns: the gradient of each call's first input, and the gradient of each
    output that the calling module's own code uses. The entries are in the order of the backward pass, innermost modules
    first.
    """
    gradients: dict[str, Kept] = field(default_factory=dict)
    """Gradient of each parameter, after the reduction over all axes."""
    clipped: dict[str, Kept] = field(default_factory=dict)
    """Gradients that the optimizer received."""
    parameters: dict[str, Kept] = field(default_factory=dict)
    """Parameters after the optimizer's step."""
    firsts: dict[str, str] = field(default_factory=dict)
    """For calls with several outputs, maps the name of the first output to the name that it would have as the only
    output.
    """
    averages: dict[str, Kept] = field(default_factory=dict)
    """Moving averages of the parameters after the step, keyed by the parameter's name; empty if the step keeps no
    averages.
    """

    def with_wholes(self, modules: Sequence[str]) -> "Recording":
        """Return a copy without the tensors from inside `modules`. The inputs and outputs of these modules are kept."""
        insides = tuple(f"{name}{sign}" for name in modules for sign in (".", INSIDE))
        outputs, returned = (
            {name: tensor for name, tensor in seen.items() if not name.startswith(insides)}
            for seen in (self.outputs, self.returned)
        )
        return replace(self, outputs=outputs, returned=returned)

    def of_stages(self, *, has_loss: bool = True) -> "Recording":
        """Return a copy in a form in which pipeline stages and the uncut model can be compared. Tensors that the
        top-level module itself computes are left out. If a call has several outputs, the first is named after the call
        alone. On a stage without the loss (`has_loss` is false), the gradients that the next stage sent are also left
        out.
        """
        outputs, returned = (
            {self.firsts.get(name, name): tensor for name, tensor in seen.items() if not self._is_of_root(name)}
            for seen in (self.outputs, self.returned)
        )
        if not has_loss:
            returned.pop(LOSS, None)
        return replace(self, outputs=outputs, returned=returned)

    def _is_of_root(self, name: str) -> bool:
        return call_of(name).partition(", call ")[0] == self.root


class Step(Protocol):
    """Training step in two halves, `accumulate` and `update`. Gradients are recorded between the two halves."""

    @property
    def model(self) -> nn.Module:
        """Model of the step. The recording watches the forward calls of the model's modules."""

    @property
    def mesh(self) -> ParallelMesh:
        """Mesh over which the model is cut."""

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Moving averages of the parameters, keyed by the parameter's name; empty if the step keeps no averages."""

    @property
    def watches_again(self) -> bool:
        """Whether to record all calls of the whole model. If false, only the first call is recorded."""

    def accumulate(self) -> Tensor:
        """Run the forward pass, the backward pass and the reduction of gradients. Returns this rank's part of the
        loss.
        """

    def update(self, loss: Tensor) -> tuple[float, float]:
        """Sum the loss over all ranks, clip the gradients and run the optimizer. Returns the loss of all ranks, and the
        gradient norm before clipping. The clipped gradients stay in `.grad`.
        """


def record(step: Step) -> Recording:
    """Run the step and record it. Every rank of the step's mesh must call this function."""
    recording = Recording(root=display_name(step.model))
    stages = step.model if isinstance(step.model, GPT) and step.model.mesh.pipeline is not None else None
    with _watched(step.model, recording, again=step.watches_again, stages=stages):
        loss = step.accumulate()
    recording.gradients = gradients_of(step.model)
    recording.loss, recording.norm = step.update(loss.detach())
    recording.clipped = gradients_of(step.model)
    recording.parameters = {name: Kept(_copy(p), cut_dim(p)) for name, p in step.model.named_parameters()}
    recording.averages = {name: Kept(_copy(each), cut_dim(each)) for name, each in step.averages.items()}
    return recording


def gradients_of(model: nn.Module) -> dict[str, Kept]:
    """Copy all gradients, keyed by the parameter's name. A missing gradient counts as zeros."""
    kept = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(_copy(parameter)) if parameter.grad is None else _copy(parameter.grad)
        kept[name] = Kept(gradient, cut_dim(parameter))
    return kept


def _copy(tensor: Tensor) -> Tensor:
    """Gather a tensor over the data ranks, and copy this tensor rank's part to the host. Every rank must call this
    function.
    """
    return gathered_over_data(tensor).cpu()


@contextmanager
def _watched(model: nn.Module, recording: Recording, *, again: bool, stages: GPT | None) -> Iterator[None]:
    """Context that records outputs and returned gradients of the model's first call. If `again` is true, every call is
    recorded. A compiled module is recorded as a whole. `stages` is the model if it is divided into pipeline stages,
    otherwise None; with stages, each stage's calls for the first micro-batch are recorded.
    """
    watch = _Watch(recording, again=again, stages=stages)
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
    """Name of the whole model in a recording: the name of the model's class."""
    return type(model).__name__.removeprefix("FSDP")  # sharding adds this prefix to the class


class _Watch:
    """Watcher of one step: gives each module call a name and follows tensors between the calls. Recomputation in the
    backward pass does not count as a call.
    """

    def __init__(self, recording: Recording, *, again: bool, stages: GPT | None) -> None:
        self.recording = recording
        self._stages = stages
        self._again, self._seen = again, False
        self._num_calls: dict[str, int] = {}
        self._running: list[str] = []
        self._followed: dict[int, _Followed] = {}
        self._held: list[Tensor] = []
        """Followed tensors, and the tensors that replace them as inputs of sharded modules. They are kept alive so that
        no other tensor gets the same id.
        """
        self._entering: _Followed | None = None

    def enter(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._looks_away():
            return
        self._num_calls[name] = count = self._num_calls.get(name, 0) + 1
        call = name if count == 1 else f"{name}, call {count}"
        parent = self._running[-1] if self._running else LOSS
        self._running.append(call)
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
            if id(inputs[0]) not in self._followed:  # the parent's own code made it
                self.recording.outputs[f"{parent}{INSIDE}input of {call}"] = inputs[0].detach().cpu().clone()
            self._entering = self._follow(inputs[0], f"{parent}{INSIDE}input of {call}")
            self._entering.consumers.append(call)

    def entered(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Treat a replaced input as the module's input. If the module is sharded, a hook replaces the module's input
        after `enter` has run. This function runs after that hook.
        """
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
            inside = f"{parent}{INSIDE}output of "
            self.recording.outputs[name] = tensor.detach().cpu().clone()
            passed_on = self._follow(tensor, "")
            passed_on.unless_consumed = f"{inside}{name}" if self._running else LOSS
            if several and i == 0:
                self.recording.firsts |= {name: call, f"{inside}{name}": f"{inside}{call}"}

    def _looks_away(self) -> bool:
        over = self._seen if self._stages is None else self._stages.streams.micro_batch > 0
        return is_recomputing() or (over and not self._again)

    def _follow(self, tensor: Tensor, unless_consumed: str) -> "_Followed":
        """Record the tensor's gradient when the backward pass reaches the tensor."""
        found = self._followed.get(id(tensor))
        if found is None:
            found = self._followed[id(tensor)] = _Followed(unless_consumed)
            self._held.append(tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._receive, found))
        return found

    def let_go(self) -> None:
        """Release all tensors. A tensor's hook refers to the tensor, so without this call neither the tensor nor its
        autograd graph would ever be freed.
        """
        self._held.clear()
        self._followed.clear()
        self._entering = None

    def _receive(self, followed: "_Followed", gradient: Tensor) -> None:
        kept = gradient.detach().cpu().clone()
        for name in reversed(followed.consumers or [followed.unless_consumed]):
            if name == LOSS and self._stages is not None:  # the stage with the loss comes first in the backward pass
                self.recording.returned.setdefault(name, kept)
            else:
                self.recording.returned[name] = kept


@dataclass
class _Followed:
    unless_consumed: str
    """Name under which the gradient is recorded if no module takes the tensor as input."""
    consumers: list[str] = field(default_factory=list)
    """Calls that took the tensor as input, innermost last."""
