"""Recording of a step while it runs: hooks give each module call a name and follow tensors between the calls."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from crosscut.model import GPT
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import gather_from_all, meet
from crosscut.parallel.linear import is_recomputing
from crosscut.parallel.state.parameters import is_distributed, local_part, whole
from crosscut.training.speed.compilation import compiled_modules
from crosscut.verification.assembly import Place
from crosscut.verification.recording import (
    ARRIVED,
    IN_MICRO_BATCH,
    INSIDE,
    LOSS,
    RECEIVED,
    Columns,
    ParameterShard,
    Recording,
    ShardOf,
    StepFailure,
    TensorKind,
    in_any_micro_batch,
    module_of,
)

_LONGEST_ERROR = 300
"""Largest number of characters of an error's message in a report."""

_PATIENCE, _PATIENCE_AFTER_ERROR = 3600.0, 30.0
"""Seconds that a rank waits for the others at the end of a step. A rank whose step failed waits for less time: the
others may wait for a message of this rank, and then its error says why."""


class RecordedStep(Protocol):
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
    def statistics(self) -> Mapping[str, Tensor]:
        """Running statistics of norms, keyed by the buffer's name."""

    @property
    def is_copied(self) -> bool:
        """Whether every rank holds whole activations, except those that tell their places (`uncut_places`)."""

    @property
    def shard_of(self) -> ShardOf:
        """Function that copies this rank's shard of a parameter or of its gradient."""

    @property
    def may_fail(self) -> bool:
        """Whether an error of the forward or the backward pass is a difference between the cut and the uncut model. If
        false, the error is raised.
        """

    def accumulate(self) -> Tensor:
        """Run the forward pass, the backward pass and the reduction of gradients. Returns this rank's part of the
        loss.
        """

    def update(self, loss: Tensor) -> tuple[float, float]:
        """Sum the loss over all ranks, clip the gradients and run the optimizer. Returns the loss of all ranks, and the
        gradient norm before clipping. The clipped gradients stay in `.grad`.
        """


def record(step: RecordedStep) -> Recording:
    """Run the step and record it. Every rank of the step's mesh must call this function."""
    recording, shard_of = Recording(root=display_name(step.model), is_copied=step.is_copied), step.shard_of
    with _watched(step.model, recording) as watch:
        loss, error = _attempted(step)
    if step.may_fail and (failure := _failure_of_any(error, watch)):
        seen = {name: local_part(tensor) for name, tensor in recording.outputs.items()}
        return replace(recording, outputs=seen, returned={}, failure=failure, loss=math.nan, norm=math.nan)
    recording.outputs, recording.returned = map(_without_cuts, (recording.outputs, recording.returned))
    recording.gradients = gradients_of(step.model, shard_of)
    recording.loss, recording.norm = step.update(loss.detach())
    recording.clipped = gradients_of(step.model, shard_of)
    recording.parameters = {name: shard_of(name, p) for name, p in step.model.named_parameters()}
    recording.averages = {name: shard_of(name, each) for name, each in step.averages.items()}
    recording.statistics = {name: ParameterShard.of_any(each) for name, each in step.statistics.items()}
    return recording


def _attempted(step: RecordedStep) -> tuple[Tensor, Exception | None]:
    """Run the two passes of a step. Returns the loss, which is NaN after an error, and the error of a step that may
    fail.
    """
    try:
        return step.accumulate(), None
    except Exception as error:
        if not step.may_fail:
            raise
        return torch.tensor(math.nan), error


def _failure_of_any(error: Exception | None, watch: "_StepWatcher") -> "StepFailure | None":
    """Return the failure of the first rank on which the step failed, None if there is no such rank. `error` is this
    rank's error. Every rank must call this function. If a rank does not, because it waits for a message of this rank,
    this rank's error is raised.
    """
    text = "" if error is None else next(iter(str(error).splitlines()), "").rstrip(".")[:_LONGEST_ERROR]
    own = None if error is None else StepFailure(watch.innermost, f"{type(error).__name__}: {text}")
    try:
        meet(_PATIENCE if error is None else _PATIENCE_AFTER_ERROR)
    except RuntimeError:
        raise error or RuntimeError("another rank does not reach the end of the step") from None
    return next(filter(None, gather_from_all(own)), None)


def gradients_of(model: nn.Module, shard_of: ShardOf = ParameterShard.of) -> dict[str, ParameterShard]:
    """Copy all gradients, keyed by the parameter's name. A missing gradient counts as zeros."""
    return {
        name: shard_of(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in model.named_parameters()
    }


def _without_cuts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather the distributed tensors among recorded tensors. This is done after the step, because a hook that sends
    messages would change the messages of the step.
    """
    return {name: whole(seen).cpu() if is_distributed(seen) else seen for name, seen in tensors.items()}


def _copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host. The copy of a distributed tensor is distributed, any other copy an ordinary tensor."""
    if is_distributed(tensor):
        return tensor.detach().clone()
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may allow only some functions
        return tensor.detach().cpu().clone()


def _outputs_of(output: object) -> list[object]:
    """Return the values that a module returns, whether they are in a sequence, in a mapping or alone."""
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple | list) else [output]


def follows_batches(module: nn.Module) -> bool:
    """Whether a module has running statistics, as a batch norm has."""
    return module._buffers.get("num_batches_tracked") is not None


@contextmanager
def _watched(model: nn.Module, recording: Recording) -> Iterator["_StepWatcher"]:
    """Context that records outputs and returned gradients of all calls. A compiled module is recorded as a whole."""
    micro_batches = MicroBatches(model)
    watch = _StepWatcher(recording, micro_batches)
    insides = tuple(f"{name}." for name in compiled_modules(model))
    with ExitStack() as stack:
        stack.callback(watch.let_go)
        for name, module in model.named_modules():
            if not name.startswith(insides):
                enter = partial(watch.enter, name or display_name(model))
                stack.enter_context(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                stack.enter_context(module.register_forward_pre_hook(watch.entered, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(watch.leave))
        stack.enter_context(micro_batches)
        yield watch


def display_name(model: nn.Module) -> str:
    """Name of the whole model in a recording: the name of the model's class."""
    return type(model).__name__.removeprefix("FSDP")  # sharding adds this prefix to the class


def _first(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Return the first argument of a call, by position or by name; None if there is none."""
    return next(iter((*args, *kwargs.values())), None)


def _is_real(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of floating point."""
    return isinstance(value, Tensor) and value.is_floating_point()


class MicroBatches:
    """Context that counts the micro-batches of a step. The model, or each of the rank's pipeline stages, runs the
    forward passes of the micro-batches in order. Every call of a model that is not a `GPT` belongs to micro-batch 1.
    """

    def __init__(self, model: nn.Module) -> None:
        self.current = 1
        """Number of the micro-batch whose forward pass runs, or was the last to run."""
        self._model = model
        self._calls: Counter[object] = Counter()
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Self:
        if isinstance(self._model, GPT):
            self._hook = self._model.register_forward_pre_hook(self._count, prepend=True, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _count(self, _: nn.Module, __: tuple[object, ...], how: dict[str, Any]) -> None:
        stage = how["stage_input"].stage if how.get("stage_input") else None
        self._calls[stage] += 1
        self.current = self._calls[stage]


class _StepWatcher:
    """Watcher of one step: gives each module call a name and follows tensors between the calls. Recomputation in the
    backward pass does not count as a call.
    """

    def __init__(self, recording: Recording, micro_batches: MicroBatches) -> None:
        self.recording, self._micro_batches = recording, micro_batches
        self._num_calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._followed: dict[int, _Followed] = {}
        self._held: list[Tensor] = []
        """Followed tensors, and the tensors that replace them as inputs of sharded modules. They are kept alive so that
        no other tensor gets the same id.
        """
        self._entering: _Followed | None = None

    @property
    def innermost(self) -> str:
        """Name of the innermost module that has begun but not ended, or `LOSS` if there is no such module."""
        return module_of(self._running[-1]) if self._running else LOSS

    def enter(self, name: str, _: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if is_recomputing():
            return
        self._num_calls[self._name(name)] += 1
        count = self._num_calls[self._name(name)]
        call = name if count == 1 else f"{name}, call {count}"
        parent = self._running[-1] if self._running else LOSS
        self._running.append(call)
        for key, x in kwargs.items() if parent == LOSS else ():
            if _is_real(x) and x is not _first(args, kwargs):
                self._follow(x, "").consumers.append(self._name(f"{call}[{key}]"))
        if _is_real(x := _first(args, kwargs)):
            made = self._name(f"{parent}{INSIDE}input of {call}")
            is_new = id(x) not in self._followed  # the parent's own code made it
            self._entering = self._follow(x, made)
            if is_new:
                self._note(made, self._entering, x)
            self._entering.consumers.append(self._name(call))
            self.recording.origins[self._name(call)] = self._entering.unless_consumed
            if len(self._running) == 2:
                self._note(self._name(f"{call}{ARRIVED}"), self._entering, x)

    def entered(self, _: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Treat a replaced input as the module's input. If the module is sharded, a hook replaces the module's input
        after `enter` has run. This function runs after that hook.
        """
        if is_recomputing():
            return
        x = _first(args, kwargs)
        if _is_real(x) and id(x) not in self._followed and self._entering is not None:
            self._followed[id(x)] = self._entering
            self._held.append(x)

    def leave(self, module: nn.Module, _: tuple[object, ...], output: object) -> None:
        if is_recomputing():
            return
        columns_of = getattr(module, "uncut_columns", None)
        call = self._running.pop()
        inside = f"{self._running[-1] if self._running else LOSS}{INSIDE}output of "
        outputs = _outputs_of(output)
        several = sum(isinstance(each, Tensor) for each in outputs) > 1
        for i, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                continue
            name = f"{call}[{i}]" if several else call
            passed_on = self._follow(tensor, "")
            passed_on.columns = passed_on.columns or (None if columns_of is None else columns_of())
            self._note(self._name(name), passed_on, tensor)
            if passed_on.columns is not None:
                self.recording.columns[TensorKind.OUTPUT, self._name(name)] = passed_on.columns
            is_whole = module_of(call) == self.recording.root
            passed_on.unless_consumed = self._name(LOSS if is_whole else f"{inside}{name}")
            if len(self._running) == 1:
                passed_on.received = self._name(f"{name}{RECEIVED}")
            if several and i == 0:
                forms = ("{}", f"{inside}{{}}", f"{{}}{RECEIVED}")
                self.recording.firsts |= {
                    self._name(form.format(name)): self._name(form.format(call)) for form in forms
                }

    def _name(self, name: str) -> str:
        """Return the name of a tensor or a call in the current micro-batch, given its name in the first one."""
        number = self._micro_batches.current
        return f"{name}{IN_MICRO_BATCH}{number}" if number > 1 else name

    def _note(self, name: str, followed: "_Followed", tensor: Tensor) -> None:
        """Record a tensor under a name."""
        self.recording.outputs[name] = self._copied(followed, tensor)
        if followed.places is not None:
            self.recording.places[TensorKind.OUTPUT, name] = followed.places

    def _copied(self, followed: "_Followed", tensor: Tensor) -> Tensor:
        """Copy a tensor to the host, unless it was copied before and has not changed since."""
        if followed.copy is None or followed.version != tensor._version:
            followed.copy, followed.version = _copy_of(tensor), tensor._version
        return followed.copy

    def _follow(self, tensor: Tensor, unless_consumed: str) -> "_Followed":
        """Record the tensor's gradient when the backward pass reaches the tensor."""
        found = self._followed.get(id(tensor))
        if found is None:
            places_of = getattr(tensor, "uncut_places", None)
            found = self._followed[id(tensor)] = _Followed(unless_consumed, None if places_of is None else places_of())
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
        kept = _copy_of(gradient)
        for name in reversed(followed.consumers or [followed.unless_consumed]):
            if followed.columns is not None:
                self.recording.columns[TensorKind.RETURNED, name] = followed.columns
            self._note_places(followed, name)
            if in_any_micro_batch(name) == LOSS:  # of several stages, the stage with the loss comes first
                self.recording.returned.setdefault(name, kept)
            else:
                self.recording.returned[name] = kept
        if followed.received:
            self.recording.returned[followed.received] = kept
            self._note_places(followed, followed.received)

    def _note_places(self, followed: "_Followed", name: str) -> None:
        if followed.places is not None:
            self.recording.places[TensorKind.RETURNED, name] = followed.places


@dataclass
class _Followed:
    unless_consumed: str
    """Name under which the gradient is recorded if no module takes the tensor as input."""
    places: Sequence[Place] | None = None
    """Places of all ranks' parts in the uncut tensor; None if the tensor does not tell them."""
    consumers: list[str] = field(default_factory=list)
    """Calls that took the tensor as input, innermost last."""
    copy: Tensor | None = None
    """Copy of the tensor in host memory."""
    version: int = -1
    """Version counter of the tensor when the copy was made."""
    columns: Columns | None = None
    """Columns of the uncut tensor that each tensor rank holds; None if their shapes say it."""
    received: str = ""
    """Name under which the gradient is also recorded; empty if the tensor is not an output of a part of the whole
    model.
    """
