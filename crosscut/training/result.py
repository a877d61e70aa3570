"""Figures of a step, for which the host waits only when it reads one.

A GPU is given its work long before it does it. So the copy of a step's figures to host memory is queued behind the
step's own work, and only a reader of a figure waits: the loop reads them when it has launched the next step.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config import TrainingError
from crosscut.training.loss_scale import SMALLEST, LossScale


class Moment:
    """A point in a device's work, after all that it was given so far. On the CPU, which is done by then: now."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when the device has reached this moment."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_to(self, later: "Moment") -> float:
        """Seconds of the device from this moment to `later`, which it must have reached."""
        if self._event is None or later._event is None:
            return later._time - self._time
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1000.0


class NonFiniteError(Exception):
    """The loss or the gradient norm of a step is not a finite number; the weights are still those before the step."""

    def __init__(self, step: int, loss: float, norm: float, exhausted: TrainingError | None = None) -> None:
        super().__init__(f"step {step + 1}: loss {loss}, gradient norm {norm}")
        self.step = step
        self.exhausted = exhausted
        """With a loss scale, the error to show the user where the forward pass is finite."""


class _Figures(NamedTuple):
    loss: float
    norm: float
    held: float
    scale: float


class StepResult:
    """The figures of one step; the first look at one waits until the device has done the step.

    It raises `NonFiniteError` then, on every rank alike, where the loss or the gradient norm is not finite, with a loss
    scale only where that has fallen too low to be of use. The weights are those before the step, and stay so through
    every later step.
    """

    def __init__(
        self, step: int, rate: float, *, loss: Tensor, norm: Tensor, held: Tensor, loss_scale: LossScale | None
    ) -> None:
        """`held` is 1 where the step changed nothing. `loss_scale` as it was in the step."""
        self.step = step
        """Index of the step, counted from 0."""
        self.learning_rate = rate
        self._scaled = loss_scale is not None
        scale = loss_scale.scale if loss_scale is not None else torch.ones_like(held)
        self._arriving = _to_host(torch.stack([figure.double() for figure in (loss, norm, held, scale)]))
        self.end = Moment(loss.device)
        """Moment at which the step is done."""
        self._figures: _Figures | None = None

    def wait(self) -> "StepResult":
        """Return once the step is done; raises as the class says."""
        self._look()
        return self

    @property
    def loss(self) -> float:
        """Mean cross entropy per target token over the whole batch, in nats; of a skipped step it may be no number."""
        return self._look().loss

    @property
    def gradient_norm(self) -> float:
        """Global norm before clipping; of a skipped step it is no number."""
        return self._look().norm

    @property
    def loss_scale(self) -> float | None:
        """Factor of the loss before the backward pass; None where the precision needs no loss scale."""
        scale = self._look().scale
        return scale if self._scaled else None

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing, since its gradients had overflowed at its loss scale."""
        return bool(self._look().held)

    def values(self) -> dict[str, float | int]:
        """The figures by name, as the run's metrics hold them; those of a loss scale only where there is one."""
        told: dict[str, float | int] = {
            "loss": self.loss, "gradient_norm": self.gradient_norm, "learning_rate": self.learning_rate
        }  # fmt: skip
        if self.loss_scale is not None:
            told.update(loss_scale=self.loss_scale, skipped=int(self.skipped))
        return told

    def _look(self) -> _Figures:
        if self._figures is None:
            self.end.wait()
            self._figures = _Figures(*self._arriving.tolist())
        figures = self._figures
        if figures.held and not self._scaled:
            raise NonFiniteError(self.step, figures.loss, figures.norm)
        if figures.held and figures.scale / 2 < SMALLEST:
            exhausted = TrainingError(
                f"The loss scale must stay at or above {SMALLEST:g}, but the gradients of step {self.step + 1} "
                f"overflowed at {figures.scale:g}, so that it would fall to {figures.scale / 2:g}. The weights are "
                "those from before it overflowed. Lower `optimizer.learning_rate`, or set "
                'training.precision="bfloat16" or "float32", and run again with --resume auto.'
            )
            raise NonFiniteError(self.step, figures.loss, figures.norm, exhausted)
        return figures


def _to_host(numbers: Tensor) -> Tensor:
    """The numbers in host memory, once the device has come that far; nobody waits here."""
    return numbers.to("cpu", non_blocking=True) if numbers.is_cuda else numbers  # into pinned memory
