"""Sizes of a study: runs that differ in the model, but not in the data, the steps or the tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from crosscut.config import ConfigError, RunConfig, load_run
from crosscut.config.checks import Settings, shown

WIDTHS: Mapping[str, int] = {"small": 32, "medium": 64, "large": 128}
"""Hidden size of each built-in size. As in GPT-2, the model has learned positions and layer norms."""

_HEAD = 32
"""Columns of a head of the built-in sizes."""

_TRAINING = (
    *("steps", "batch_size", "initial_batch_size", "ramp_steps", "sequence_length", "document_mask", "seed"),
    *("validation_sequences", "validate_every"),
)
"""Settings of `[training]` that all sizes must share."""


class Size(NamedTuple):
    """One size of a study."""

    name: str
    run: RunConfig


def load_sizes(arguments: Sequence[str]) -> list[Size]:
    """Load the sizes of a study. `arguments` are run files, one for each size, and overrides for all sizes. Without a
    file, the sizes are those of `WIDTHS`.

    Raises `ConfigError` if a file cannot be loaded, if two files have the same name, if the sizes do not share their
    data, steps and tasks, or if a model cannot be trained on text.
    """
    files = [Path(word) for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    if files:
        sizes = [Size(file.stem, load_run(file, overrides)) for file in files]
    else:
        sizes = [Size(name, load_run(_built_in(width, overrides), overrides)) for name, width in WIDTHS.items()]
    names = [size.name for size in sizes]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(
            f"The run files must have different names, but {names.count(twice)} are called `{twice}`. Rename one: the "
            "name of the file is the name of the size."
        )
    if same := next((size for size in sizes[1:] if size.run.model == sizes[0].run.model), None):
        raise ConfigError(
            f"The sizes must differ in their models, but `{sizes[0].name}` and `{same.name}` are the same. Give a run "
            "file for each size, and no overrides of `model` that make them equal."
        )
    for size in sizes:
        size.run.require_objective()
        _require_same(sizes[0], size)
        if not size.run.optimizer.learning_rate:
            raise ConfigError(
                f"`optimizer.learning_rate` must be above 0, but is 0 for `{size.name}`. Remove it to use the default."
            )
    return sizes


def _built_in(width: int, overrides: Sequence[str]) -> dict[str, Settings]:
    model = {"num_layers": 4, "hidden_size": width, "num_heads": width // _HEAD, "max_sequence_length": 256}
    has_tokens = any(word.startswith("data.tokens=") for word in overrides)
    text = {} if has_tokens else {"text": ["builtin:state-of-the-union"]}
    return {
        "model": {**model, "dropout": 0.0},
        "data": {"vocab_size": 4096, **text},
        "training": {"validation_sequences": 128},
        "checkpoint": {"every": 100, "keep": 1},
        "output": {"sample_tokens": 0, "trackers": []},
    }


def _require_same(first: Size, size: Size) -> None:
    theirs = _shared(size.run)
    for name, value in _shared(first.run).items():
        if theirs[name] != value:
            raise ConfigError(
                f"`{name}` must be the same for all sizes, but is {shown(value)} for `{first.name}` and "
                f"{shown(theirs[name])} for `{size.name}`. Change one file, or override it for all: {name}=VALUE."
            )


def _shared(run: RunConfig) -> Settings:
    """Settings that all sizes of a study must share, by name."""
    shared: Settings = {"model.vocab_size": run.model.vocab_size}
    shared |= {f"training.{name}": getattr(run.training, name) for name in _TRAINING}
    for section in ("data", "evaluation"):
        settings = getattr(run, section)
        shared |= {f"{section}.{field.name}": getattr(settings, field.name) for field in fields(settings)}
    return shared
