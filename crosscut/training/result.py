"""Loss, gradient norm and other figures of a step. The host waits for the device only when a figure is read.

A GPU runs its work long after the host has queued it. The copy of the figures to host memory is therefore queued right
after the step's own work. The loop reads the figures after it has launched the next step.
"""

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config import TrainingError
from crosscut.training.loads.step_loads import StepLoads
from crosscut.training.loss_scale import SMALLEST, LossScale


class Moment:
    """Point in a device's queue of work, after all work that has been queued so far. The CPU has no queue: on the CPU,
    a moment is the time at which the object was created.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_host = time.perf_counter()
        """Time on the host's clock at which the object was created, in seconds. The processes of one machine share the
        clock."""
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has finished all work that was queued before the `Moment` was created."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_to(self, later: "Moment") -> float:
        """Seconds between this moment and `later` on the device. The device must have reached both moments."""
        if self._event is None or later._event is None:
            return later.on_host - self.on_host
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1000.0


class NonFiniteError(Exception):
    """The loss or the gradient norm of a step is not finite. The step has not changed the weights."""

    def __init__(self, step: int, figures: "_StepFigures", exhausted: TrainingError | None = None) -> None:
        super().__init__(f"step {step + 1}: loss {figures.loss}, gradient norm {figures.norm}")
        self.step, self.loss, self.norm = step, figures.loss, figures.norm
        self.is_finite_here = math.isfinite(figures.own)
        """Whether this rank's part of the loss and all gradients on this rank were finite after the gradients had been
        summed over the ranks.
        """
        self.exhausted = exhausted
        """Error for the user if the loss scale is the only cause: the forward pass is finite, but the scale has fallen
        too low. None without a loss scale.
        """


class DeviceFigures(NamedTuple):
    """Figures of a step on the device. Each figure is a scalar tensor."""

    loss: Tensor
    """Mean loss over all ranks."""
    norm: Tensor
    """Gradient norm; NaN if a value on at least one rank is not finite."""
    held: Tensor
    """1 if the step changed nothing, else 0."""
    own: Tensor
    """Number that is finite only if this rank's part of the loss and this rank's gradients are finite
    (`GradientNorm.own`).
    """


class _StepFigures(NamedTuple):
    loss: float
    norm: float
    held: float
    own: float
    scale: float


class StepResult:
    """Figures of one step. The first access to a figure waits until the device has finished the step.

    Without a loss scale, this access raises `NonFiniteError` on every rank if the loss or the gradient norm is not
    finite. With a loss scale, the access raises `NonFiniteError` only if the scale has fallen below its smallest useful
    value. After a `NonFiniteError`, the weights are unchanged by the step, and no later step changes them.
    """

    def __init__(
        self,
        step: int,
        rate: float,
        figures: DeviceFigures,
        *,
        loss_scale: LossScale | None,
        more: Mapping[str, Tensor] = MappingProxyType({}),
        loads: StepLoads | None = None,
    ) -> None:
        """Queue copies of the figures to the host. `loss_scale` has the value that the step used. `more` are further
        scalars to report, by name. `loads` are those of the experts; None without experts.
        """
        self.step = step
        """Index of the step, counted from 0."""
        self.learning_rate = rate
        self._scaled = loss_scale is not None
        scale = loss_scale.scale if loss_scale is not None else torch.ones_like(figures.held)
        self._names = tuple(more)
        self._loads = loads
        numbers = torch.stack([figure.double() for figure in (*figures, scale, *more.values())])
        if loads is not None:
            numbers = torch.cat([numbers, loads.table.flatten()])
        self._arriving = numbers.to("cpu", non_blocking=True) if numbers.is_cuda else numbers  # in pinned memory
        self.end = Moment(scale.device)
        """Moment at which the device has finished the step."""
        self._figures: _StepFigures | None = None
        self._more: dict[str, float] = {}

    def wait(self) -> "StepResult":
        """Wait until the device has finished the step. Raises `NonFiniteError` (see the class)."""
        self._look()
        return self

    @property
    def loss(self) -> float:
        """Mean cross entropy per target token over the whole batch, in nats. May be NaN or infinite if the step was
        skipped.
        """
        return self._look().loss

    @property
    def gradient_norm(self) -> float:
        """Global gradient norm before clipping. NaN or infinite if the step was skipped."""
        return self._look().norm

    @property
    def loss_scale(self) -> float | None:
        """Factor that multiplied the loss before the backward pass; None if the precision needs no loss scale."""
        scale = self._look().scale
        return scale if self._scaled else None

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing, because its gradients overflowed at its loss scale. Always False without a
        loss scale.
        """
        return bool(self._look().held)

    def values(self) -> dict[str, float | int]:
        """Return the figures by name, as `metrics.jsonl` stores them. `loss_scale` and `skipped` are present only if
        the run has a loss scale, and figures of experts only if the model has some.
        """
        told: dict[str, float | int] = {
            "loss": self.loss, "gradient_norm": self.gradient_norm, "learning_rate": self.learning_rate
        }  # fmt: skip
        if self.loss_scale is not None:
            told.update(loss_scale=self.loss_scale, skipped=int(self.skipped))
        return {**told, **self._more}

    def loads(self) -> StepLoads | None:
        """Loads of the experts, on the host. None for a model without experts."""
        self._look()
        if self._loads is None:
            return None
        shape = self._loads.table.shape
        return self._loads._replace(table=self._arriving[-shape.numel() :].view(shape))

    def _look(self) -> _StepFigures:
        if self._figures is None:
            self.end.wait()
            fields = len(_StepFigures._fields)
            arrived = self._arriving[: fields + len(self._names)].tolist()
            self._figures = _StepFigures(*arrived[:fields])
            self._more = dict(zip(self._names, arrived[fields:], strict=True))
        figures = self._figures
        if figures.held and not self._scaled:
            raise NonFiniteError(self.step, figures)
        if figures.held and figures.scale / 2 < SMALLEST:
            exhausted = TrainingError(
                f"The loss scale must stay at or above {SMALLEST:g}, but the gradients of step {self.step + 1} "
                f"overflowed at scale {figures.scale:g}, so the scale would fall to {figures.scale / 2:g}. The weights "
                "are those from before the overflow. Lower `optimizer.learning_rate`, or set "
                'training.precision="bfloat16" or "float32", and run again with --resume auto.'
            )
            raise NonFiniteError(self.step, figures, exhausted)
        return figures
