"""Figures of the two studies, and their form in a JSON file."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import torch

from crosscut.architecture.words import shape_in_figures
from crosscut.config import ConfigError, RunConfig
from crosscut.config.system.files import read_json
from crosscut.config.system.machine import processor_name
from crosscut.config.system.records import from_json
from crosscut.evaluation.task import exponential
from crosscut.launch.processes import choose_device
from crosscut.logbook.contents import read_metrics, read_summary
from crosscut.planner import count_parameters
from crosscut.scaling.quality.runs import has_diverged, step_flops


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Figures of one run."""

    seed: int
    validation: tuple[tuple[int, float], ...]
    """Number of steps and validation loss in nats, of each validation pass."""
    scores: Mapping[str, float | None]
    """Scores of the tasks after the last step, with the names of `metrics.jsonl`. A score that is not finite is None.
    """
    seconds: float
    """Time of the steps since the last start of the run."""

    @property
    def perplexity(self) -> float:
        """Validation perplexity after the last step."""
        return exponential(self.validation[-1][1])

    def figure(self, name: str) -> float | None:
        """Figure by its name: that of a score, or `validation`. None if the run has no such score."""
        return self.perplexity if name == "validation" else self.scores.get(name)


@dataclass(frozen=True, kw_only=True)
class SizeFigures:
    """Figures of one size with all seeds."""

    name: str
    model: str
    """Shape of the model in figures (`architecture.words`)."""
    parameters: int
    learning_rate: float
    step_flops: int
    """FLOPs of a step."""
    runs: tuple[RunFigures, ...]

    def figures(self, name: str) -> list[float]:
        """Figures of all seeds by their name, in the order of the seeds. Empty if a run has no such figure."""
        found = [run.figure(name) for run in self.runs]
        return [] if None in found else [figure for figure in found if figure is not None]

    def curve(self) -> list[tuple[int, float]]:
        """Number of steps, and the exponential of the mean validation loss over the seeds."""
        columns = zip(*(run.validation for run in self.runs), strict=True)
        return [(column[0][0], exponential(mean(loss for _, loss in column))) for column in columns]


@dataclass(frozen=True, kw_only=True)
class StudyResults:
    """Settings that all runs of a study share."""

    machine: Mapping[str, str]
    text: tuple[str, ...]
    """Names of the files of the text, without their folders."""
    vocab_size: int
    steps: int
    """Number of steps of a run."""
    batch_size: int
    sequence_length: int


@dataclass(frozen=True, kw_only=True)
class QualityResults(StudyResults):
    """Results of the study of quality."""

    window: int
    """Window of the tasks in tokens."""
    stride: int
    """Stride of WikiText-103 in tokens."""
    sizes: tuple[SizeFigures, ...]
    """Sizes in the order of their parameters."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run that tried a learning rate."""

    rate: float
    loss: float | None
    """Validation loss after the last step, in nats. None if the run diverged."""


@dataclass(frozen=True, kw_only=True)
class SizeRates:
    """Learning rates that were tried for one size."""

    name: str
    model: str
    """Shape of the model in figures (`architecture.words`)."""
    parameters: int
    trials: tuple[Trial, ...]
    """Trials in the order of their rates."""

    @property
    def best(self) -> float | None:
        """Rate with the lowest validation loss. None if all runs diverged."""
        found = [(trial.loss, trial.rate) for trial in self.trials if trial.loss is not None]
        return min(found)[1] if found else None


@dataclass(frozen=True, kw_only=True)
class RateResults(StudyResults):
    """Results of the study of learning rates."""

    share: float
    """Length of a trial as a share of the whole run."""
    sizes: tuple[SizeRates, ...]
    """Sizes in the order of their parameters."""


def shared_by(run: RunConfig, text: tuple[str, ...]) -> StudyResults:
    """Return what all runs share, from one of them and the names of the files of its text."""
    return StudyResults(
        machine=machine_of(run),
        text=text,
        vocab_size=run.model.vocab_size,
        steps=run.training.steps,
        batch_size=run.training.batch_size,
        sequence_length=run.training.sequence_length,
    )


def machine_of(run: RunConfig) -> dict[str, str]:
    """Describe the machine on which a run is trained."""
    on_gpu = choose_device(run.training.device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else processor_name(),
        "date": datetime.now(tz=UTC).date().isoformat(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }


def size_figures(name: str, runs: Sequence[RunConfig]) -> SizeFigures:
    """Read the figures of the finished runs of a size."""
    run = runs[0]
    return SizeFigures(
        name=name,
        model=shape_in_figures(run.model),
        parameters=count_parameters(run.model),
        learning_rate=run.optimizer.learning_rate,
        step_flops=step_flops(run),
        runs=tuple(map(_run_figures, runs)),
    )


def _run_figures(run: RunConfig) -> RunFigures:
    folder = Path(run.output.folder)
    summary = read_summary(folder) or {}
    every, steps = run.training.validate_every, run.training.steps
    losses = {row["step"]: row["validation_loss"] for row in read_metrics(folder) if "validation_loss" in row}
    planned = {0, *(range(0, steps, every) if every else ()), steps}  # a run that continues also has other passes
    table = {
        "seed": run.training.seed,
        "validation": [(step, losses[step]) for step in sorted(planned & losses.keys())],
        "scores": summary.get("evaluation", {}),
        "seconds": summary["training_seconds"],
    }
    return from_json(RunFigures, table)


def trial_of(run: RunConfig) -> Trial:
    """Read the result of a trial."""
    summary = read_summary(Path(run.output.folder)) or {}
    loss = None if has_diverged(run) else from_json(float, summary["validation_loss_after"])
    return Trial(rate=run.optimizer.learning_rate, loss=loss if loss is None or math.isfinite(loss) else None)


def size_rates(name: str, runs: Sequence[RunConfig]) -> SizeRates:
    """Read the results of the trials of a size."""
    model = runs[0].model
    return SizeRates(
        name=name,
        model=shape_in_figures(model),
        parameters=count_parameters(model),
        trials=tuple(map(trial_of, runs)),
    )


def read_rates(path: Path) -> RateResults:
    """Read the file of rates that `crosscut study rate` has written. Raises `ConfigError` for any other file."""
    remedy = "Name the file `rates.json` in the output of `crosscut study rate`."
    try:
        return from_json(RateResults, read_json(path, remedy=remedy))
    except ValueError as error:
        raise ConfigError(
            f"`--rates` must be a file of learning rates, but `{path}` is not: {error}. {remedy}"
        ) from None
