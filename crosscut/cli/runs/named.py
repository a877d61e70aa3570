"""The run that a user names: a file, the folder of a run, a Hugging Face folder, or a preset.

This is the only place that reads such a name, so every command with the arguments of a run takes all four.
"""

import json
from pathlib import Path

from crosscut.config import PRESETS, ConfigError
from crosscut.config.checks import listed
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.loading import meant_settings
from crosscut.config.loading.keys import nearest
from crosscut.config.published.folders import MODEL_FILE, is_published

RUN = "RUN.toml|FOLDER|PRESET"
"""Placeholder for the name of a run in the help of commands."""


def with_named_run(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of a run with a file or only settings in place of the name of the run.

    The name of a run's folder becomes that of its resolved file. The name of a Hugging Face folder becomes the setting
    `training.initialize_from`, and that of a preset, whole or by its end, the setting `model.preset`. Raises
    `ConfigError` for a folder without a model, and for a name that is similar to a preset's.
    """
    if not arguments or not arguments[0] or "=" in arguments[0]:
        return arguments
    name, *settings = arguments
    path = Path(name)
    if (path / CONFIG_FILE).is_file():
        return (str(path / CONFIG_FILE), *settings)
    if path.is_dir() and is_published(path):
        return (f"training.initialize_from={json.dumps(name, ensure_ascii=False)}", *settings)
    if path.is_file() or path.suffix == ".toml" or "/" in name.rstrip("/"):
        _require_no_folder(path)
        return arguments
    if len(found := _presets(name)) == 1:
        return (f"model.preset={found[0]}", *settings)
    _require_no_folder(path)
    is_setting = any(key.endswith(f".{name}") for key in meant_settings(name))
    if found or (_close(name) and not is_setting):
        named_preset(name, option=RUN)
    return arguments


def named_preset(name: str, *, option: str = "--model") -> str:
    """Name of the preset that a value of `option` names, whole or by its end. Raises `ConfigError` if there is none, or
    if there are several.
    """
    found = _presets(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"`{option}` must name one preset, but {name!r} is the end of several names. Choose {listed(found)}."
        )
    close = _close(name)
    hint = f"The nearest is `{close}`." if close else f"Choose {listed(f'`{preset}`' for preset in PRESETS)}."
    what = "a preset" if option != RUN else "the file of a run, its folder or a preset"
    raise ConfigError(f"`{option}` must name {what}, but is `{name}`. {hint}")


def _presets(name: str) -> list[str]:
    """Presets with this name or, if there are none, with this end."""
    wanted = name.lower()
    whole = [preset for preset in PRESETS if preset == wanted]
    return whole or [preset for preset in PRESETS if preset.endswith(f"-{wanted}")]


def _close(name: str) -> str:
    """Preset whose name, or its end, is the most similar to a name. Empty if none is similar."""
    ends = {preset.partition("-")[2]: preset for preset in reversed(PRESETS)} | {preset: preset for preset in PRESETS}
    return next((ends[end] for end in nearest(name.lower(), ends)), "")


def _require_no_folder(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(
            f"`{RUN}` must name the folder of a run or a Hugging Face folder, but `{path}` has neither `{CONFIG_FILE}` "
            f"nor `{MODEL_FILE}`. Name another folder."
        )
