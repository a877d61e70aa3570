"""Expand a run's `recipe` into settings, and compute the settings whose defaults depend on other settings."""

import dataclasses
from typing import Any

from crosscut.config.checks import shown
from crosscut.config.errors import ConfigError
from crosscut.config.loading.building import parsed
from crosscut.config.loading.keys import advice, nearest
from crosscut.config.loading.mistakes import Mistakes
from crosscut.config.model import ModelConfig
from crosscut.config.optimizer import MatrixOptimizer, OptimizerConfig
from crosscut.config.published.presets import PRESETS, sequence_length_of
from crosscut.config.recipes import RECIPES, default_recipe, steps_between_validations
from crosscut.config.training import TrainingConfig

_WARM_UP_SHARE, _DECAY = 20, 10
"""Limits for settings that the run does not give: the warm-up takes at most a twentieth of the steps, and the learning
rate falls at least to a tenth of its maximum."""

_INITIAL_WEIGHTS = ("initial_spread", "zero_initial_outputs")
"""Keys of `[training]` for random initial weights. A run that starts from published weights does not have these
keys."""


def expand_recipe(table: dict[str, Any], preset: str, mistakes: Mistakes) -> None:
    """Add the settings of the recipe that the key `recipe` names, except those that the run gives. If the key is
    missing or empty, `default_recipe` chooses a recipe for the model, and the key becomes its name; it stays empty if
    the run leaves nothing to the recipe. `preset` is the name of the model's preset, or empty.

    For some settings, the recipe gives only a maximum, and a run with few steps, short sequences or a low learning rate
    gets a lower value: `optimizer.warmup_steps`, `training.validate_every`, `training.sequence_length` and
    `optimizer.min_learning_rate`. The batch size is rounded up to a multiple of the number of data ranks. The recipe
    sets no separate learning rate for an output projection that is tied to the embedding, or for matrices that Muon
    does not update. In a run with `training.initialize_from`, the folder gives the model and the initial weights, so
    the recipe sets neither.

    An unknown recipe is recorded as a mistake. The most similar recipe, or the default recipe, is used in its place, so
    that the mistake does not cause further errors.
    """
    training = table.get("training")
    initial = parsed(training.get("initialize_from", "")) if isinstance(training, dict) else ""
    default = default_recipe(_model_of(table), preset=preset, initialize_from=initial)
    given = parsed(table.get("recipe", ""))
    name = given or default
    if not isinstance(name, str) or name not in RECIPES:
        close = [found for found in (nearest(shown(name), RECIPES),) if found]
        mistakes.note(ConfigError(f"`recipe` must name a recipe, but is {shown(name)}.{advice(close, RECIPES)}"))
        name = close[0] if close else default
    table["recipe"] = name if given or not _is_complete(table) else ""
    recipe = _for_published_weights(RECIPES[name]) if initial else RECIPES[name]
    defaults = {
        "training": {**_plain(TrainingConfig), **recipe.get("training", {})},
        "optimizer": {**_plain(OptimizerConfig), **recipe.get("optimizer", {})},
    }
    for section in defaults:
        table.setdefault(section, {})
    if all(isinstance(table[section], dict) for section in defaults):
        _limit(table, defaults, preset)
    for section, values in recipe.items():
        if isinstance(table.setdefault(section, {}), dict):
            table[section] = {**values, **table[section]}


def _model_of(table: dict[str, Any]) -> ModelConfig | None:
    """Model of the run, or None if the settings of the model are wrong, which is reported later."""
    section, names = table.get("model"), {field.name for field in dataclasses.fields(ModelConfig)}
    try:
        return (
            ModelConfig(**{key: parsed(value) for key, value in section.items() if key in names}) if section else None
        )
    except (ConfigError, TypeError, ValueError, AttributeError):
        return None


def _is_complete(table: dict[str, Any]) -> bool:
    """Whether the run gives every setting that the recipe "small" sets, as the resolved file of a run does."""
    return all(
        isinstance(table.get(section), dict) and values.keys() <= table[section].keys()
        for section, values in RECIPES["small"].items()
    )


def _for_published_weights(recipe: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Recipe without the settings that the folder in `training.initialize_from` determines."""
    training = {key: value for key, value in recipe.get("training", {}).items() if key not in _INITIAL_WEIGHTS}
    return {"training": training, "optimizer": recipe.get("optimizer", {})}


def _limit(table: dict[str, Any], defaults: dict[str, dict[str, Any]], preset: str) -> None:
    """Compute the settings that depend on other settings, except those that the run gives."""
    training, optimizer = table["training"], table["optimizer"]
    steps, rate = (_number(table, defaults, *key) for key in (("training", "steps"), ("optimizer", "learning_rate")))
    if steps is not None:
        warm_up, every = defaults["optimizer"]["warmup_steps"], defaults["training"]["validate_every"]
        optimizer.setdefault("warmup_steps", min(warm_up, int(steps) // _WARM_UP_SHARE))
        training.setdefault("validate_every", min(every, steps_between_validations(int(steps))))
    if rate is not None and "learning_rate" in optimizer:
        optimizer.setdefault("min_learning_rate", min(defaults["optimizer"]["min_learning_rate"], rate / _DECAY))
    layout, batch = table.get("layout"), defaults["training"]["batch_size"]
    data = parsed(layout.get("data")) if isinstance(layout, dict) else None
    training.setdefault("batch_size", batch + -batch % data if type(data) is int and data > 0 else batch)
    model = table.get("model")
    if isinstance(model, dict) and parsed(model.get("tied")) is True:
        optimizer.setdefault("head_learning_rate", 0.0)
    if parsed(optimizer.get("matrices", defaults["optimizer"]["matrices"])) != MatrixOptimizer.MUON:
        optimizer.setdefault("matrix_learning_rate", 0.0)
    length = sequence_length_of(preset) if preset in PRESETS else defaults["training"]["sequence_length"]
    longest = parsed(model.get("max_sequence_length")) if isinstance(model, dict) else None
    training.setdefault("sequence_length", min(length, longest) if type(longest) is int and longest > 0 else length)


def _number(table: dict[str, Any], defaults: dict[str, dict[str, Any]], section: str, key: str) -> float | None:
    """Value of a setting. None if the value is not a positive number below 2^63."""
    value = parsed(table[section].get(key, defaults[section][key]))
    return value if type(value) in (int, float) and 0 < value < 2**63 else None


def _plain(kind: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}
