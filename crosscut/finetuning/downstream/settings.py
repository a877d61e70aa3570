"""Arguments of one `crosscut finetune TASK` command, and the settings of its runs."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from crosscut.config import ConfigError, ModelConfig, RunConfig, load_run
from crosscut.config.system.files import parse_toml, read_small
from crosscut.finetuning.downstream.task import RACE, SQUAD, TunedTask

EPOCHS, WARMUP = 3.0, 0.06
"""Default number of epochs, and default fraction of the steps during which the learning rate rises."""

SECTION = "finetuning"
"""Section of a settings file that holds the number of epochs and the warm-up fraction."""

_LENGTHS = {SQUAD: 384, RACE: 512}
_LENGTH = 128
"""Default maximum number of tokens of a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """Arguments of one `crosscut finetune TASK` command."""

    task: TunedTask
    """The task, before its files are read."""
    model: str = ""
    """Location of the model: a Hugging Face folder, a run's folder or a checkpoint."""
    output: str
    """Folder of the run."""
    data: str = ""
    """Folder with the published files of the task."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """File with the examples of each part, keyed by the part's name. A file that is given here replaces the part's file
    in `data`."""
    seeds: int = 1
    """Number of runs, each with a seed of its own."""
    ensemble: bool = False
    """Whether to also score the mean of the runs' probabilities."""
    epochs: float | None = None
    """Number of times that a run reads all examples. None means the value in the settings file or, if the file gives
    none, 3."""
    warmup: float | None = None
    """Fraction of the steps during which the learning rate rises. None means the value in the settings file or, if the
    file gives none, 0.06."""
    resume: bool = False
    settings: str = ""
    """File with settings; empty for none."""
    overrides: tuple[str, ...] = ()
    """Settings of the run, `section.key=value`, which replace the settings of the file."""


def settings_of(order: TaskOrder, model: ModelConfig, steps_per_epoch: int = 0) -> RunConfig:
    """Return the settings of the runs that a command starts. `model` is the model with the head of the task.

    `steps_per_epoch` is the number of batches of an epoch; 0 means that the number is not known yet. Raises
    `ConfigError` or `LayoutError` for settings that are wrong or have no effect.
    """
    file, course = _settings_file(order.settings)
    given = {f"{section}.{key}" for section, values in file.items() if isinstance(values, dict) for key in values}
    given |= {override.partition("=")[0] for override in order.overrides}
    _require_supported(given)
    table = {"recipe": "paper", **_merged(_defaults(order, model), file)}
    run = load_run(table, order.overrides)
    _require_consistent(run)
    if steps_per_epoch:
        asked = {"epochs": order.epochs, "warmup": order.warmup}
        course |= {name: value for name, value in asked.items() if value is not None}
        values = {name: value for name, value in _course(run, given, course, steps_per_epoch) if name not in given}
        run = load_run(table, (*(f"{name}={value}" for name, value in values.items()), *order.overrides))
        _require_best_checkpoint(run)
    return run


def _merged(defaults: Mapping[str, Mapping[str, object]], file: Mapping[str, object]) -> dict[str, object]:
    """Return the tables of a settings file, with the default of each setting that the file does not have."""
    own = {section: file.get(section, {}) for section in defaults}
    both = {section: {**defaults[section], **values} for section, values in own.items() if isinstance(values, dict)}
    return {**file, **both}


def _defaults(order: TaskOrder, model: ModelConfig) -> dict[str, dict[str, object]]:
    length = min(_LENGTHS.get(order.task.name, _LENGTH), model.max_sequence_length)
    return {
        "model": dataclasses.asdict(model),
        "training": {
            "batch_size": 32, "sequence_length": length, "steps": 1, "seed": 1234, "compile": "off",
            "validate_every": 0, "validation_sequences": 0,
        },
        "optimizer": {
            "learning_rate": 2e-5, "min_learning_rate": 0.0, "schedule": "linear", "warmup_steps": 0,
            "weight_decay": 0.01, "clip_norm": 1.0,
        },
        "checkpoint": {"keep": 1},
        "output": {"folder": order.output, "sample_tokens": 0},
    }  # fmt: skip


def _settings_file(path: str) -> tuple[dict[str, object], dict[str, float]]:
    """Read a settings file. Returns the tables with the settings of a run, and the table with the number of epochs and
    the warm-up fraction.
    """
    if not path:
        return {}, {}
    try:
        table = parse_toml(read_small(Path(path)))
    except OSError as error:
        raise ConfigError(
            f"`{path}` must be a readable TOML file, but is not: {error.strerror}. Check the path."
        ) from None
    except ValueError as error:
        raise ConfigError(f"`{path}` must be valid TOML, but is not: {error}. Correct the file.") from None
    course = table.pop(SECTION, {})
    if not isinstance(course, dict) or (unknown := [key for key in course if key not in ("epochs", "warmup")]):
        told = f"has the key `{unknown[0]}`" if isinstance(course, dict) else "is a value"
        raise ConfigError(
            f"`[{SECTION}]` in `{path}` must be a section with only the keys `epochs` and `warmup`, but {told}. "
            "Correct the section."
        )
    require_course(course, f"in `{path}` ")
    return table, course


def require_course(course: Mapping[str, object], where: str = "") -> None:
    """Raise `ConfigError` unless the number of epochs is above 0, and the warm-up is at least 0 and below 1. `where` is
    a phrase that names the file of the values in the message. It is empty if there is no file.
    """
    epochs, warmup = course.get("epochs", EPOCHS), course.get("warmup", WARMUP)
    if not _is_number(epochs) or not 0 < epochs < math.inf:
        raise ConfigError(f"`epochs` {where}must be above 0, but is {epochs!r}. Try {EPOCHS:g}.")
    if not _is_number(warmup) or not 0 <= warmup < 1:
        raise ConfigError(f"`warmup` {where}must be at least 0 and below 1, but is {warmup!r}. Try {WARMUP:g}.")


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _course(
    run: RunConfig, given: set[str], course: Mapping[str, float], steps_per_epoch: int
) -> Iterator[tuple[str, int]]:
    """Yield the number of steps and of warm-up steps, and the settings for a validation pass and a checkpoint at the
    end of each epoch. Settings in `given` keep their values.
    """
    steps = run.training.steps
    if "training.steps" not in given:
        steps = max(1, math.ceil(course.get("epochs", EPOCHS) * steps_per_epoch))
    every = run.training.validate_every if "training.validate_every" in given else min(steps, steps_per_epoch)
    yield "training.steps", steps
    yield "training.validate_every", every
    yield "optimizer.warmup_steps", min(steps - 1, round(course.get("warmup", WARMUP) * steps))
    yield "checkpoint.every", every


_REASONS = {
    "data.": "The command reads its examples from the files of the task",
    "evaluation.": "The command scores the model on the task",
    "model.": "`--model` decides the model",
    "training.initialize_from": "`--model` names the model",
    "output.folder": "`--output` names the folder",
}
"""Reasons why settings would have no effect, keyed by the beginning of their names. `model.dropout` is an exception: it
has an effect."""


def _require_supported(given: set[str]) -> None:
    """Raise `ConfigError` for settings that would have no effect (`_REASONS`)."""
    for name in sorted(given - {"model.dropout"}):
        for start, reason in _REASONS.items():
            if name.startswith(start):
                raise ConfigError(f"`{name}` must not be set for `finetune`, but is set. {reason}. Remove `{name}`.")


def _require_consistent(run: RunConfig) -> None:
    """Raise `ConfigError` for settings that conflict with training by epochs or with keeping the best checkpoint."""
    if run.training.initial_batch_size:
        raise ConfigError(
            "`training.initial_batch_size` must be 0 for `finetune`, but is "
            f"{run.training.initial_batch_size}. All batches of an epoch have the same size. Remove "
            "`training.initial_batch_size`."
        )
    if run.optimizer.ema_decay:
        raise ConfigError(
            f"`optimizer.ema_decay` must be 0 for `finetune`, but is {run.optimizer.ema_decay}. The command keeps "
            "the best checkpoint instead of an average. Remove `optimizer.ema_decay`."
        )


def _require_best_checkpoint(run: RunConfig) -> None:
    """Raise `ConfigError` unless every scored step has a checkpoint, so that the best one can be kept."""
    every, saved = run.training.validate_every, run.checkpoint.every
    if every and (not saved or every % saved):
        raise ConfigError(
            f"`checkpoint.every` must divide `training.validate_every` ({every}), but is {saved}. Every score needs a "
            "checkpoint, so that the best checkpoint can be kept. Remove `checkpoint.every`."
        )
