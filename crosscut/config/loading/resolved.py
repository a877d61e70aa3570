"""A run whose device and precision are decided, even if the run's file leaves these settings open.

A run's file may set `training.device` and `training.precision` to "auto". `resolve` decides these settings once, before
any rank starts. The trainer, the loop and the forecasts then use the same values.
"""

from dataclasses import dataclass, replace
from typing import Literal

from crosscut.config.layout import Layout
from crosscut.config.model import ModelConfig
from crosscut.config.optimizer import OptimizerConfig
from crosscut.config.precision import Precision
from crosscut.config.run import RunConfig
from crosscut.config.training import TrainingConfig

Device = Literal["cpu", "cuda"]
"""Kind of device on which the ranks of a run compute."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run, with the kind of device for which its precision was chosen. Use `resolve` to create this object."""

    config: RunConfig
    """The run's config, as recorded in its folder and its checkpoints. `training.precision` is never `auto`."""

    device: Device
    """Kind of device on which the ranks compute."""

    def __post_init__(self) -> None:
        assert self.config.training.precision is not Precision.AUTO, "only `resolve` makes a resolved run"

    @property
    def model(self) -> ModelConfig:
        """Architecture and sizes of the model."""
        return self.config.model

    @property
    def layout(self) -> Layout:
        """Number of ranks along each axis."""
        return self.config.layout

    @property
    def training(self) -> TrainingConfig:
        """Settings of the training loop."""
        return self.config.training

    @property
    def optimizer(self) -> OptimizerConfig:
        """Settings of the optimizer and of the learning rates."""
        return self.config.optimizer

    @property
    def precision(self) -> Precision:
        """Precision of the training step. Never `auto`."""
        return self.training.precision

    def with_config(self, config: RunConfig) -> "ResolvedRun":
        """Resolve another run for the same device. If the other run's precision is `auto`, this run's precision is
        used.
        """
        return resolve(config, device=self.device, precision=self.precision)


def resolve(run: RunConfig, *, device: Device, precision: str) -> ResolvedRun:
    """Resolve a run for a kind of device. If the run's `training.precision` is "auto", `precision` replaces it."""
    return ResolvedRun(config=replace(run, training=run.training.in_precision(precision)), device=device)
