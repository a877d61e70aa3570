"""Times of the parts of a model in a step, forward and backward, on one rank.

Hooks divide the whole step into intervals. Each interval belongs to the part that computes, such as the attention of
layer 3, or to a phase of the step, such as the optimizer. The sum of all intervals is therefore the time of the step.

The forward pass of a module begins and ends with the module's call. Its backward pass begins when the gradient of its
output arrives, and ends when the gradient of its input is complete. The gradients of its weights are computed in
between. If layers are recomputed, the second forward pass belongs to the backward pass, and is also counted alone. The
hooks are inside the context `PartTimer.step` only, and change no value. A compiled layer is one part, because no
hook can run in its code. On a GPU, the times are those of the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from crosscut.architecture.pipeline import Action, Pass, Stage
from crosscut.flight import RECORD, RunPhase
from crosscut.flight.record import RecordWord
from crosscut.model.block import Block
from crosscut.training.result import Moment
from crosscut.training.step import Trainer
from crosscut.training.watching.throughput import synchronize


class Place(NamedTuple):
    """Part of a model, or phase of a step, to which time belongs."""

    layer: int | None
    """Index of the layer; None for a part outside of the layers, and for a phase."""
    part: str


EMBEDDING, FINAL_NORM, HEAD = (Place(None, name) for name in ("embedding", "final_norm", "head"))
WEIGHT_GRADIENTS = Place(None, "weight gradients")
"""Gradients of weights that a pipeline's schedule computes after the backward passes."""
BETWEEN_PASSES = Place(None, "between passes")
"""Time between the passes of a pipeline's stages."""
OTHER = Place(None, "not attributed")
PHASES = {
    RunPhase.DATA: Place(None, "batch"),
    RunPhase.REDUCTION: Place(None, "sums of gradients"),
    RunPhase.OPTIMIZER: Place(None, "optimizer"),
}
"""Phases of a step outside of the passes."""
WHOLE, REST = "layer", "rest"
"""Parts of a layer: a compiled layer, and what is in none of its other parts, such as dropout and residual sums."""


class _Way(Enum):
    FORWARD = 0
    BACKWARD = 1
    AGAIN = 2
    """Forward pass inside the backward pass, because the layer is recomputed."""


@dataclass
class Seconds:
    """Seconds of a part in a step on one rank."""

    forward: float = 0.0
    backward: float = 0.0
    """Seconds of the backward pass, including those of `again`."""
    again: float = 0.0
    """Seconds of a forward pass that recomputation repeats in the backward pass."""
    messages: float = 0.0
    """Seconds that the process started messages and waited for them, which the other fields include."""

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


class StepTimes(NamedTuple):
    """Times of a step on one rank."""

    seconds: float
    parts: dict[Place, Seconds]
    """Seconds of each part. Their sum is `seconds`."""


class _Mark(NamedTuple):
    """Start of an interval."""

    place: Place
    way: _Way
    moment: Moment
    waited: int
    """Nanoseconds that the process had spent on messages."""


class PartTimer:
    """Timer of the parts of a rank's model, which is also an `Observer` of pipeline stages.

    timer = PartTimer(trainer)
    with timer.step():
        trainer.step(step, micro_batches)
    timer.usual()
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.model = trainer, trainer.model
        self.steps: list[StepTimes] = []
        self._marks: list[_Mark] = []
        self._parents: list[tuple[Place, _Way]] = []
        self._hooked = WeakTensorKeyDictionary()
        self._is_backward = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context in which the caller runs one step. The device is idle at its start and at its end."""
        device = self.trainer.mesh.device
        handles = [handle for module, place in self._modules() for handle in self._hooks(module, place)]
        handles += [
            self.model.register_forward_pre_hook(self._enter_model, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._leave_model, with_kwargs=True),
        ]
        RECORD.on_phase, observer = self._enter_phase, self.trainer.observer
        self.trainer.observer = self if self.trainer.mesh.is_staged else observer
        synchronize(device)
        self._mark(OTHER, _Way.FORWARD)
        try:
            yield
            self._mark(OTHER, _Way.FORWARD)
        finally:
            RECORD.on_phase, self.trainer.observer = None, observer
            for handle in handles:
                handle.remove()
        synchronize(device)
        self._add_up()

    def usual(self) -> StepTimes:
        """Return the step whose time is the median of all steps."""
        return sorted(self.steps, key=lambda step: step.seconds)[len(self.steps) // 2]

    def start(self, action: Action) -> None:
        """Begin an action of a pipeline stage."""
        if action.kind is Pass.WEIGHTS:
            self._mark(WEIGHT_GRADIENTS, _Way.BACKWARD)
        elif action.kind is Pass.BACKWARD:
            self._mark(HEAD if self.model.stages[action.chunk].is_last else OTHER, _Way.BACKWARD)

    def end(self, action: Action, *, weight_gradients: int) -> None:
        """End an action of a pipeline stage."""
        del action, weight_gradients
        self._mark(BETWEEN_PASSES, _Way.FORWARD)

    def _modules(self) -> Iterator[tuple[nn.Module, Place]]:
        """Yield the modules with times of their own, and their places."""
        for index, block in zip(self.model.part.indexes, self.model.blocks, strict=True):
            assert isinstance(block, Block)
            is_whole = block.runner.compiler is not None
            yield block, Place(index, WHOLE if is_whole else REST)
            for name in () if is_whole else (name for names in block.parts for name in names[:2]):
                yield getattr(block, name), Place(index, name)
        if self.model.final_norm is not None:
            yield self.model.final_norm, FINAL_NORM

    def _hooks(self, module: nn.Module, place: Place) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield module.register_forward_pre_hook(partial(self._enter, place), prepend=True)  # before weights are gathered
        yield module.register_forward_hook(partial(self._leave, place), always_call=True)  # recomputation may end early

    def _mark(self, place: Place, way: _Way) -> None:
        waited = RECORD[RecordWord.WAITED] + RECORD[RecordWord.SENDING]
        self._marks.append(_Mark(place, way, Moment(self.trainer.mesh.device), waited))

    def _enter_phase(self, phase: int) -> None:
        """Begin a phase of the step."""
        self._is_backward = phase == RunPhase.BACKWARD
        self._parents.clear()
        if self._is_backward and self.model.part.is_last:
            self._mark(HEAD, _Way.BACKWARD)
        else:
            self._mark(PHASES.get(RunPhase(phase), OTHER), _Way.BACKWARD if self._is_backward else _Way.FORWARD)

    def _enter_model(self, _module: nn.Module, _args: object, arguments: dict[str, object]) -> None:
        self._mark(EMBEDDING if self._stage(arguments).is_first else OTHER, _Way.FORWARD)

    def _leave_model(self, _module: nn.Module, _args: object, arguments: dict[str, object], _output: object) -> None:
        self._mark(HEAD if self._stage(arguments).is_last else OTHER, _Way.FORWARD)

    def _stage(self, arguments: dict[str, object]) -> Stage:
        """Return the stage that a forward pass of the model runs."""
        given = arguments.get("stage_input")
        return self.model.stages[0] if given is None else given.stage  # type: ignore[attr-defined]

    def _enter(self, place: Place, _module: nn.Module, inputs: tuple[object, ...]) -> None:
        parent = self._marks[-1]
        self._parents.append((parent.place, parent.way))
        self._mark_at_gradient(inputs[0], parent.place)
        self._mark(place, _Way.AGAIN if self._is_backward else _Way.FORWARD)

    def _leave(self, place: Place, _module: nn.Module, _inputs: object, output: object) -> None:
        self._mark_at_gradient(output[0] if isinstance(output, tuple) else output, place)
        if self._parents:
            place, way = self._parents.pop()
            self._mark(OTHER if place == EMBEDDING else place, way)  # the embedding ends where the layers begin

    def _mark_at_gradient(self, x: object, place: Place) -> None:
        """Make the backward pass begin `place` when the gradient of `x` is complete."""
        if self._is_backward or not isinstance(x, Tensor) or not x.requires_grad or x in self._hooked:
            return
        self._hooked[x] = None
        x.register_hook(lambda _gradient: self._mark(place, _Way.BACKWARD))

    def _add_up(self) -> None:
        parts: dict[Place, Seconds] = {}
        for begin, end in pairwise(self._marks):
            seconds = begin.moment.seconds_to(end.moment)
            of_place = parts.setdefault(begin.place, Seconds())
            of_place.messages += (end.waited - begin.waited) / 1e9
            if begin.way is _Way.FORWARD:
                of_place.forward += seconds
            else:
                of_place.backward += seconds
                of_place.again += seconds if begin.way is _Way.AGAIN else 0.0
        self.steps.append(StepTimes(self._marks[0].moment.seconds_to(self._marks[-1].moment), parts))
        self._marks = []
