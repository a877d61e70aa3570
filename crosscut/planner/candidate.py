"""Run settings without validation, for searches over thousands of layouts.

Constructing a `RunConfig` validates its fields against each other, which takes longer than a forecast. A `Candidate`
holds the sections that a forecast reads, without validation. The search itself checks which tensor sizes the model
allows. Only the chosen candidate becomes a validated `RunConfig`.
"""

from dataclasses import dataclass, field, replace

from crosscut.architecture import Device, Target, describe
from crosscut.architecture.target import shared_target
from crosscut.config import Layout, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from crosscut.config.conventions import AMPERE, MASKED_FRACTION
from crosscut.config.layouts.step import StepShape
from crosscut.config.teachers import TeacherConfig
from crosscut.config.training import Recompute


@dataclass(frozen=True)
class Candidate(StepShape):
    """Model, layout, training and optimizer settings of a run, not validated. Every forecast accepts a `Candidate`."""

    model: ModelConfig
    layout: Layout
    training: TrainingConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    mask_fraction: float = MASKED_FRACTION
    pipeline_rank: int = 0
    """Pipeline position of the rank to forecast, from 0. The ranks of a pipeline hold different layers, so their
    forecasts differ."""
    expert_skew: float = 1.0
    """Number of rows that the experts of the fullest rank receive in each layer, as a multiple of the mean over the
    ranks that share the experts."""

    @classmethod
    def of(cls, run: "Planned", precision: str) -> "Candidate":
        """Return a candidate with the settings of `run`. `precision` replaces `training.precision = "auto"`."""
        training, rank = run.training.in_precision(precision), pipeline_rank_of(run)
        return replace(cls.at(run, rank), training=training)

    @classmethod
    def at(cls, run: "Planned", pipeline_rank: int) -> "Candidate":
        """Return a candidate with the settings of `run`, for a forecast of one rank of the run's pipeline."""
        skew = expert_skew_of(run)
        own = run.model, run.layout, run.training, run.optimizer, run.teacher, run.mask_fraction
        return cls(*own, pipeline_rank, skew)


Planned = RunConfig | Candidate
"""A run that can be forecast: a validated `RunConfig` or a `Candidate`."""


def pipeline_rank_of(run: Planned) -> int:
    """Position of the rank to forecast in the run's pipeline: `Candidate.pipeline_rank`, or 0 for a `RunConfig`."""
    return run.pipeline_rank if isinstance(run, Candidate) else 0


def expert_skew_of(run: Planned) -> float:
    """Load of the fullest expert rank as a multiple of the mean: `Candidate.expert_skew`, or 1 for a `RunConfig`."""
    return run.expert_skew if isinstance(run, Candidate) else 1.0


def possible_skew(run: Planned) -> float:
    """Load of the fullest expert rank on the run's layout. The load is at most that with which every token chooses
    experts of one rank only, or as many of them as it may.
    """
    experts, ranks = run.model.experts, run.layout.expert
    return 1.0 if ranks == 1 else min(expert_skew_of(run), ranks, experts.number / experts.per_token)


def recomputation_step(run: Planned) -> int:
    """Return n if every n-th layer is recomputed, starting with the first layer; 0 if no layer is recomputed."""
    return 0 if run.training.recompute == Recompute.NONE else run.training.recompute_every


def is_compiled(run: Planned, device: str) -> bool:
    """Whether the run compiles its layers on this kind of device. The device "auto" counts as a CPU."""
    return run.is_compiled_on_gpus if device == "cuda" else run.training.compile == "on"


def target_of(run: Planned, *, device: Device, capability: tuple[int, int] = AMPERE) -> Target:
    """Return the shapes, data types and device with which one rank of `run` computes a micro-batch."""
    precision = run.training.numbers
    target = replace(
        Target.of(run.layout),
        context_attention=run.context_attention.way,
        skew=possible_skew(run),
        sequences=run.micro_batch_size,
        length=run.training.sequence_length,
        device=device,
        capability=capability,
        compute=precision.compute,
        compute_bytes=precision.compute_bytes,
        sums_bytes=precision.accumulation_bytes,
        compiled=is_compiled(run, device),
        document_mask=run.training.document_mask,
        predicted=run.predicted_tokens if "predicted" in describe(run.model).head.reads else None,
        eight_bit=run.training.precision == "float8",
    )
    return shared_target(target)
