"""Expand a run's `recipe` into settings, and compute the settings whose defaults depend on other settings."""

from collections.abc import Mapping
from typing import TypeGuard, get_origin

from crosscut.config.checks import Settings, shown
from crosscut.config.errors import ConfigError
from crosscut.config.loading.building import Override, Table, parsed
from crosscut.config.loading.keys import advice, nearest
from crosscut.config.loading.mistakes import Mistakes
from crosscut.config.model import ModelConfig
from crosscut.config.optimizer import MatrixOptimizer, OptimizerConfig
from crosscut.config.published.presets import PRESETS, sequence_length_of
from crosscut.config.recipes import RECIPES, default_recipe, steps_between_validations
from crosscut.config.system.records import fields_of
from crosscut.config.training import TrainingConfig

_WARM_UP_SHARE, _DECAY = 20, 10
"""Limits for settings that the run does not give: the warm-up takes at most a twentieth of the steps, and the learning
rate falls at least to a tenth of its maximum."""

_INITIAL_WEIGHTS = ("initial_spread", "zero_initial_outputs")
"""Keys of `[training]` for random initial weights. A run that starts from published weights does not have these
keys."""


def expand_recipe(table: Table, preset: str, mistakes: Mistakes) -> None:
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
    for section in ("training", "optimizer"):
        table.setdefault(section, {})
    sections = {name: section for name, section in table.items() if isinstance(section, dict)}
    initial = parsed(sections.get("training", {}).get("initialize_from", ""))
    default = default_recipe(_model_of(sections.get("model", {})), preset=preset, initialize_from=initial)
    given = parsed(table.get("recipe", ""))
    name = given or default
    if not isinstance(name, str) or name not in RECIPES:
        close = nearest(shown(name), RECIPES)
        mistakes.note(ConfigError(f"`recipe` must name a recipe, but is {shown(name)}.{advice(close, RECIPES)}"))
        name = close[0] if close else default
    table["recipe"] = name if given or not _is_complete(sections) else ""
    recipe = _for_published_weights(RECIPES[name]) if initial else RECIPES[name]
    if "training" in sections and "optimizer" in sections:
        training = TrainingConfig(**recipe.get("training", {}))
        _limit(sections, training, OptimizerConfig(**recipe.get("optimizer", {})), preset)
    for section, values in recipe.items():
        own = table.setdefault(section, {})
        if isinstance(own, dict):
            table[section] = {**values, **own}


def _model_of(section: Table) -> ModelConfig | None:
    """Model of the run, or None if the settings of the model are missing, or wrong, which is reported later."""
    hints = fields_of(ModelConfig)[0]
    values: Settings = {key: _value_of(hints[key], value) for key, value in section.items() if key in hints}
    try:
        return ModelConfig(**values) if section else None
    except (ConfigError, TypeError, ValueError, AttributeError):
        return None


def _value_of(hint: object, value: object) -> object:
    """Value of a setting whose type is `hint`."""
    origin: object = get_origin(hint)
    return value.items() if origin is tuple and isinstance(value, Override) else parsed(value)


def _is_complete(sections: Mapping[str, Table]) -> bool:
    """Whether the run gives every setting that the recipe "small" sets, as the resolved file of a run does."""
    return all(values.keys() <= sections.get(name, {}).keys() for name, values in RECIPES["small"].items())


def _for_published_weights(recipe: Mapping[str, Settings]) -> Mapping[str, Settings]:
    """Recipe without the settings that the folder in `training.initialize_from` determines."""
    training = {key: value for key, value in recipe.get("training", {}).items() if key not in _INITIAL_WEIGHTS}
    return {"training": training, "optimizer": recipe.get("optimizer", {})}


def _limit(sections: Mapping[str, Table], training: TrainingConfig, optimizer: OptimizerConfig, preset: str) -> None:
    """Compute the settings that depend on other settings, except those that the run gives. `training` and `optimizer`
    are those of the recipe.
    """
    model, layout, loop, rates = (sections.get(name, {}) for name in ("model", "layout", "training", "optimizer"))
    steps = _number(loop.get("steps", training.steps))
    rate = _number(rates.get("learning_rate", optimizer.learning_rate))
    if steps is not None:
        rates.setdefault("warmup_steps", min(optimizer.warmup_steps, int(steps) // _WARM_UP_SHARE))
        loop.setdefault("validate_every", min(training.validate_every, steps_between_validations(int(steps))))
    if rate is not None and "learning_rate" in rates:
        rates.setdefault("min_learning_rate", min(optimizer.min_learning_rate, rate / _DECAY))
    data, batch = parsed(layout.get("data")), training.batch_size
    loop.setdefault("batch_size", batch + -batch % data if _is_size(data) else batch)
    if parsed(model.get("tied")) is True:
        rates.setdefault("head_learning_rate", 0.0)
    if parsed(rates.get("matrices", optimizer.matrices)) != MatrixOptimizer.MUON:
        rates.setdefault("matrix_learning_rate", 0.0)
    length = sequence_length_of(preset) if preset in PRESETS else training.sequence_length
    longest = parsed(model.get("max_sequence_length"))
    loop.setdefault("sequence_length", min(length, longest) if _is_size(longest) else length)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _number(value: object) -> float | None:
    """Value of a setting. None if the value is not a positive number below 2^63."""
    number = parsed(value)
    if isinstance(number, int | float) and type(number) is not bool and 0 < number < 2**63:
        return number
    return None
