"""A run whose open choices are made: the device, and with it the precision that `auto` stands for.

A run's file may leave choices to the machine (`training.device`, `training.precision`) or ask for something that its
layout has no use for (`layout.sequence_parallel` on one tensor rank). `resolve` makes these choices once, before any
rank starts. The trainer, the loop and the forecasts then read the same answers.
"""

from dataclasses import dataclass, replace
from typing import Literal

from crosscut.config.layout import Layout
from crosscut.config.model import ModelConfig
from crosscut.config.precision import PRECISIONS, ElementTypes, Precision
from crosscut.config.run import RunConfig
from crosscut.config.training import OptimizerConfig, TrainingConfig

Device = Literal["cpu", "cuda"]
"""Kind of device that the ranks of a run compute on."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run and the device that its choices were made for. `resolve` makes it."""

    config: RunConfig
    """The run as its folder and its checkpoints record it; its `training.precision` is never `auto`."""

    device: Device
    """Kind of device that the ranks compute on."""

    @property
    def model(self) -> ModelConfig:
        """Sizes and kind of the model."""
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
        """Settings of AdamW and of the learning rate."""
        return self.config.optimizer

    @property
    def precision(self) -> Precision:
        """Precision of the step; never `auto`."""
        return self.training.precision

    @property
    def numbers(self) -> ElementTypes:
        """Element types of the precision."""
        return PRECISIONS[self.precision]

    @property
    def sequence_parallel(self) -> bool:
        """Whether the tensor ranks split the sequence between the parallel regions; false on one tensor rank."""
        return self.layout.sequence_parallel and self.layout.tensor > 1

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass of one data rank."""
        return self.config.micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Forward passes per step."""
        return self.config.num_micro_batches

    def with_config(self, config: RunConfig) -> "ResolvedRun":
        """Resolve another run on the same device, in this run's precision where the other leaves it to `auto`."""
        return resolve(config, device=self.device, precision=self.precision)


def resolve(run: RunConfig, *, device: Device, precision: str) -> ResolvedRun:
    """Resolve a run for a kind of device, on which `training.precision = "auto"` stands for `precision`."""
    return ResolvedRun(config=replace(run, training=run.training.in_precision(precision)), device=device)
