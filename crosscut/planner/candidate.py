"""The fields of a run that forecasts read, without validation, for searches over thousands of layouts.

Constructing a `RunConfig` validates its fields against each other, which takes longer than a forecast. A `Candidate`
holds the same sections without validating them. The search itself asks which tensor sizes the model allows, and makes a
validated `RunConfig` only of the candidate that is chosen.
"""

from typing import NamedTuple

from crosscut.architecture import Device, Target
from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.config.conventions import AMPERE
from crosscut.config.run import reason_against_compiling


class Candidate(NamedTuple):
    """Model, layout and training settings of a run, not validated. Every forecast accepts a `Candidate`."""

    model: ModelConfig
    layout: Layout
    training: TrainingConfig

    @classmethod
    def of(cls, run: "Planned", precision: str) -> "Candidate":
        """Candidate of a run, with `precision` in place of `training.precision = "auto"`."""
        return cls(run.model, run.layout, run.training.in_precision(precision))

    @property
    def micro_batch_size(self) -> int:
        """Same as `RunConfig.micro_batch_size`."""
        return self.training.sequences_at_once(self.layout.data)

    @property
    def num_micro_batches(self) -> int:
        """Same as `RunConfig.num_micro_batches`."""
        return self.training.batch_size // (self.layout.data * self.micro_batch_size)

    @property
    def is_compiled_on_gpus(self) -> bool:
        """Same as `RunConfig.is_compiled_on_gpus`."""
        return self.training.compile != "off" and not reason_against_compiling(self.model, self.layout)


Planned = RunConfig | Candidate
"""A run that can be forecast: a validated `RunConfig` or a `Candidate`."""


def is_compiled(run: Planned, device: str) -> bool:
    """Whether the run compiles layers on this kind of device. `auto`, a device not yet known, counts as the CPU."""
    return run.is_compiled_on_gpus if device == "cuda" else run.training.compile == "on"


def target_of(run: Planned, *, device: Device, capability: tuple[int, int] = AMPERE) -> Target:
    """Conditions under which one rank of `run` computes a micro-batch: shapes, data types and device."""
    precision = run.training.numbers
    return Target(
        tensor=run.layout.tensor,
        split=run.layout.sequence_parallel,
        sequences=run.micro_batch_size,
        length=run.training.sequence_length,
        device=device,
        capability=capability,
        compute=precision.compute,
        compute_bytes=precision.compute_bytes,
        sums_bytes=precision.accumulation_bytes,
        compiled=is_compiled(run, device),
        sends_halves=run.training.precision != "float8",
    )
