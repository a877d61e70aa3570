"""The run and the device that the user names for `crosscut plan`. The run comes from a file, a folder or a preset."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.cli.arguments import has_file
from crosscut.cli.runs.named import named_preset
from crosscut.config import ConfigError, Layout, RunConfig, load_run
from crosscut.config.checks import listed
from crosscut.config.system.terminal import echo
from crosscut.config.teachers.matching import require_teachable

if TYPE_CHECKING:
    from crosscut.planner.hardware import Hardware


def asked_run(
    arguments: tuple[str, ...], model: str | None, *, change_layout: Callable[[Layout], Layout] | None = None
) -> RunConfig:
    """Load the run to plan from its file in `arguments` or from the preset `model`. Overrides in `arguments` apply.
    `change_layout` takes the run's layout and returns the layout to use instead.

    A setting of `model.preset` or `training.initialize_from` also names a model. Raises `ConfigError` unless exactly
    one of the run and the preset is given, and if the run's teacher cannot teach its model.
    """
    from crosscut.architecture import describe
    from crosscut.architecture.optimizers.low_rank import require_low_rank

    names_model = ("model.preset=", "training.initialize_from=") if model is None else ("model.preset=",)
    is_named = has_file(arguments) or any(each.startswith(names_model) for each in arguments)
    if is_named == (model is not None):
        both = "both are" if is_named else "neither is"
        raise ConfigError(
            f"Exactly one model must be given, as the first argument or with `--model`, but {both} given. To plan a "
            "preset, type its name, such as `8.3B`."
        )
    if model is not None:
        arguments = (f"model.preset={named_preset(model)}", *arguments)
    if has_file(arguments):
        run = load_run(Path(arguments[0]), arguments[1:], change_layout=change_layout)
    else:
        run = load_run({}, arguments, change_layout=change_layout)
    require_teachable(run)
    require_low_rank(describe(run.with_vocabulary().model).parameters(), run.optimizer.gradient_rank)
    return run


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
