"""A run as far as its costs go, for a search over thousands of layouts.

A `RunConfig` is checked against itself when it is made, which takes longer than to forecast it. A `Candidate` holds
the fields that forecasts read and checks nothing: its maker has asked what the model allows, or makes a `RunConfig` of
the candidate that is chosen at last.
"""

from typing import NamedTuple

from crosscut.architecture import Device, Target
from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.config.conventions import AMPERE
from crosscut.config.run import reason_against_compiling


class Candidate(NamedTuple):
    """Stand-in for a `RunConfig` in every forecast of the planner."""

    model: ModelConfig
    layout: Layout
    training: TrainingConfig

    @classmethod
    def of(cls, run: "Planned", precision: str) -> "Candidate":
        """The fields of a run that forecasts read, with `precision` in place of `auto`."""
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
"""Subject of a forecast: a checked run or an unchecked candidate."""


def is_compiled(run: Planned, device: str) -> bool:
    """Whether layers are compiled on a kind of device. A device that is not known yet (`auto`) counts as the CPU."""
    return run.is_compiled_on_gpus if device == "cuda" else run.training.compile == "on"


def target_of(run: Planned, *, device: Device, capability: tuple[int, int] = AMPERE) -> Target:
    """Conditions under which one rank runs a micro-batch of `run`."""
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
