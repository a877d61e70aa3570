"""The run and the device that the user names for `crosscut plan`. The run comes from a file or from a preset."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.cli.arguments import has_file
from crosscut.config import PRESETS, ConfigError, Layout, RunConfig, load_run
from crosscut.config.checks import listed
from crosscut.config.loading.keys import nearest
from crosscut.config.system.terminal import echo

if TYPE_CHECKING:
    from crosscut.planner.hardware import Hardware


def asked_run(
    arguments: tuple[str, ...], model: str | None, *, change_layout: Callable[[Layout], Layout] | None = None
) -> RunConfig:
    """Load the run to plan from its file in `arguments` or from the preset `model`. Overrides in `arguments` apply.
    `change_layout` takes the run's layout and returns the layout to use instead.

    An override of `model.preset` also names a preset. Raises `ConfigError` unless exactly one of the file and the
    preset is given.
    """
    if not has_file(arguments) and model is None and any(each.startswith("model.preset=") for each in arguments):
        return load_run({}, arguments, change_layout=change_layout)
    if has_file(arguments) == (model is not None):
        both = "both are" if has_file(arguments) else "neither is"
        raise ConfigError(
            f"Exactly one model must be given, as RUN.toml or with `--model`, but {both} given. To plan a preset, type "
            "`--model 8.3B` without RUN.toml."
        )
    if has_file(arguments):
        return load_run(Path(arguments[0]), arguments[1:], change_layout=change_layout)
    return load_run({"model": {"preset": named_preset(str(model))}}, arguments, change_layout=change_layout)


def with_vocabulary(run: RunConfig) -> RunConfig:
    """Return the run with a known vocabulary size. If `model.vocab_size` is not given, it becomes the vocabulary size
    of the tokenizer that the run trains. A run whose `data.tokenizer` names a finished tokenizer is returned unchanged.
    Such a run must give `model.vocab_size`.
    """
    return run if run.data.tokenizer else run.with_vocabulary()


def asked_device(name: str, *, as_json: bool) -> "Hardware":
    """Return the device that `--gpu` names. If the name matches several devices, print which of them is used. If the
    output is JSON, this line goes to the error stream.
    """
    from crosscut.planner.hardware import named_hardware, other_matches

    hardware = named_hardware(name)
    if others := other_matches(name):
        choices = listed(f"`{key}`" for key in others)
        echo(
            f"`--gpu {name}` matches several devices. This plan is for `{hardware.key}`, the most common one. "
            f"For another one, type {choices}.",
            err=as_json,
        )
    return hardware


def named_preset(name: str, *, option: str = "--model") -> str:
    """Name of the preset that a value of `option` names, whole or by its end. Raises `ConfigError` if there is none, or
    if there are several.
    """
    wanted = name.lower()
    found = [preset for preset in PRESETS if preset == wanted] or [
        preset for preset in PRESETS if preset.endswith(f"-{wanted}")
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"`{option}` must name one preset, but {name!r} is the end of several names. Choose {listed(found)}."
        )
    ends = {preset.partition("-")[2]: preset for preset in reversed(PRESETS)} | {preset: preset for preset in PRESETS}
    close = nearest(wanted, ends)
    hint = f"The nearest is `{ends[close[0]]}`." if close else f"Choose {listed(f'`{preset}`' for preset in PRESETS)}."
    raise ConfigError(f"`{option}` must name a preset, but is `{name}`. {hint}")
