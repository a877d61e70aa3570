"""Arguments that several commands share: the run's file with its overrides, options that name a file to write, and the
options of commands that run a model.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import reduce, wraps
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import click

from crosscut.cli.runs.named import RUN, with_named_run
from crosscut.config import ConfigError, CrosscutError, Layout, RunConfig, load_run
from crosscut.config.checks import Settings, listed, require_local_path
from crosscut.config.loading import meant_settings, with_line
from crosscut.config.precision import OF_MODELS
from crosscut.config.system.files import require_writable_file
from crosscut.config.system.terminal import echo
from crosscut.config.training import Device

if TYPE_CHECKING:
    from crosscut.evaluation.ranks import Machinery

_Command = TypeVar("_Command", bound=Callable[..., object])
_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

OptionValue: TypeAlias = Any
"""Value of an option or an argument, as click has parsed it."""

DEMO_RUN = "demo.toml"

_CLOSE = 0.8
"""Minimum similarity, from 0 to 1, between an unknown option and a known option that the command suggests instead."""


class RunCommand(click.Command):
    """Command with the arguments of a run. An unknown option may be a setting that was typed with dashes, so the option
    is passed on as an argument, which `run_arguments` reads.
    """

    ignore_unknown_options = True


def run_arguments(name: str = f"[{RUN}]") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Add the arguments `[RUN.toml|FOLDER|PRESET] [section.key=value ...]` to a `RunCommand`, as one tuple named
    `arguments`, which begins with a file or has only settings (`with_named_run`). An error about a setting in the file
    states the line of the setting. `name` is the placeholder for the first argument in the help text. Without `RUN` in
    it, the first argument is only ever a file.
    """
    metavar = f"{name} [section.key=value ...]"
    read = _read_run if RUN in name else _read_arguments
    argument = click.argument("arguments", nargs=-1, metavar=metavar, callback=read)
    return lambda command: argument(_rewording(command, _with_line))


def _with_line(message: str, parameters: Mapping[str, OptionValue]) -> str:
    """Add the file name and the line number to an error about a setting in a config file. The command's parameter
    `arguments` holds the file and its overrides. With several files, the error may be about any of them.
    """
    arguments = parameters["arguments"]
    files = [Path(word) for word in arguments if "=" not in word]
    is_named = has_file(arguments) and len(files) == 1 and files[0].is_file()
    return with_line(message, files[0], arguments[1:]) if is_named else message


def _rewording(command: Callable[_P, _T], reword: Callable[[str, Mapping[str, OptionValue]], str]) -> Callable[_P, _T]:
    """Pass the messages of a command's errors, and the command's parameters, through the function `reword`."""

    @wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return command(*args, **kwargs)
        except CrosscutError as error:
            error.args = (reword(str(error), kwargs),)
            raise

    return run


def _read_arguments(context: click.Context, _argument: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Join each unknown option with its value, as in `--steps=5`, and append the result to the arguments. `run_from`
    then reports the option as an error.

    Raises `click.NoSuchOption` for an option that is not similar to any setting.
    """
    arguments, settings = [], []
    known = [option for parameter in context.command.params for option in parameter.opts]
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            arguments.append(word)
        elif (close := get_close_matches(name, known, cutoff=_CLOSE)) or not meant_settings(name.lstrip("-")):
            raise click.NoSuchOption(name, possibilities=close, ctx=context)
        else:
            takes_next = not equals and rest and not re.match(r"-|.*=|.*\.toml$", rest[0])
            settings.append(f"{name}={(rest.pop(0) if takes_next else value) or 'VALUE'}")
    return (*arguments, *settings)


def _read_run(context: click.Context, argument: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    return with_named_run(_read_arguments(context, argument, words))


def run_from(arguments: tuple[str, ...], *, change_layout: Callable[[Layout], Layout] | None = None) -> RunConfig:
    """Load the run that the arguments describe. Without a file, load the demo that comes with Crosscut. If there is no
    file but the arguments name data, only the recipe and the model come from the demo. `change_layout` takes the run's
    layout and returns the layout to use instead. Raises `ConfigError` or `LayoutError` for an invalid run.
    """
    if has_file(arguments):
        return load_run(Path(arguments[0]), arguments[1:], change_layout=change_layout)
    demo = tomllib.loads((files("crosscut.config") / DEMO_RUN).read_text(encoding="utf-8"))
    if _has_any(arguments, "training.initialize_from="):
        demo = {}
    elif _has_any(arguments, "data.text=", "data.tokens="):
        demo = {"recipe": demo["recipe"], "model": demo["model"]}
    if _has_any(arguments, "model.preset="):
        demo.pop("recipe", None)  # the preset has a recipe of its own
    return load_run(demo, arguments, change_layout=change_layout)


def _has_any(arguments: tuple[str, ...], *settings: str) -> bool:
    return any(argument.startswith(settings) for argument in arguments)


def has_file(arguments: tuple[str, ...]) -> bool:
    """Whether the first argument is the name of a run's file. Otherwise, all arguments are overrides,
    `section.key=value`.
    """
    return bool(arguments) and "=" not in arguments[0]


def on_devices_there(run: RunConfig, advice: str = "") -> RunConfig:
    """Move the run to the CPU if `device` is auto and this machine has GPUs, but fewer GPUs than the run has ranks. A
    message on the error stream says so and ends with `advice`. Any other run is returned unchanged.
    """
    from crosscut.launch.processes import has_too_few_gpus

    if run.training.device != "auto" or not has_too_few_gpus(run.layout.world_size):
        return run
    told = f"The {run.layout.world_size} ranks run on the CPU, because there are fewer GPUs than ranks."
    echo(f"{told} {advice}".rstrip(), err=True)
    return replace(run, training=replace(run.training, device=Device.CPU))


def require_folder(option: str, path: Path) -> None:
    """Create the folder at `path`. Raise `ConfigError` unless the folder can be created and written to. Commands call
    this function before their work starts. The message names the option in `option`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"`{option}` must name a writable folder, but is `{path}`: {error.strerror}. Name another folder."
        ) from None


class LocalPath(click.Path):
    """Path on this machine. A URL is refused, because `Path` would take it for a folder with a name such as `s3:`."""

    def convert(self, value: OptionValue, param: click.Parameter | None, ctx: click.Context | None) -> OptionValue:
        """Return the path. Raises `ConfigError` for a URL."""
        if param is not None and isinstance(value, str):
            is_option = isinstance(param, click.Option)
            require_local_path(param.opts[0] if is_option else param.human_readable_name, value)
        return super().convert(value, param, ctx)


def file_option(name: str, **attributes: OptionValue) -> Callable[[_Command], _Command]:
    """Add an option that names a file to write. A command fails before its work starts if the file cannot be written.

    `attributes` are passed to `click.option`.
    """
    return click.option(name, type=LocalPath(path_type=Path), callback=_writable, **attributes)


def _writable(_context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        require_writable_file(option.opts[0], path)
    return path


tensor_option = click.option(
    "--tensor", default=1, show_default=True, help="Number of tensor ranks that share the model."
)
device_option = click.option(
    "--device",
    type=click.Choice(Device.values()),
    default="auto",
    show_default=True,
    help="Device that the model runs on: auto is the GPU if there is one, and the CPU otherwise.",
)
precision_option = click.option(
    "--precision",
    type=click.Choice(OF_MODELS),
    default="float32",
    show_default=True,
    help="Element type of the weights and of the matrix products.",
)
last_weights_option = click.option(
    "--last-weights",
    is_flag=True,
    help="Use the weights of the last step, even if the checkpoint also holds a moving average.",
)
adapter_option = click.option(
    "--adapter",
    type=LocalPath(),
    metavar="FOLDER",
    default="",
    help="Folder of an adapter (LoRA) in PEFT's format. The adapter is merged into the model's weights.",
)


def all_of(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Add several options to a command, in this order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


model_options = all_of(tensor_option, device_option, precision_option, last_weights_option, adapter_option)
"""Options of a command that runs a finished model on tensor ranks."""


def machinery(*, tensor: int, data: int = 1, **choices: OptionValue) -> "Machinery":
    """Ranks and weights of a finished model, from the options of a command."""
    from crosscut.evaluation.ranks import Machinery

    return Machinery(layout=Layout(tensor=tensor, data=data), **choices)


TASKS = ("wikitext103", "lambada")
"""Names of the test sets that `--task` takes."""

task_option = click.option(
    "--task", "tasks", multiple=True, metavar="NAME=FILE", help="Test set to score: wikitext103=FILE or lambada=FILE."
)


def task_files(tasks: tuple[str, ...]) -> Settings:
    """Map each task's name to its file. Raises `ConfigError` for an unknown task and for a task that is named twice."""
    files: dict[str, str] = {}
    for task in tasks:
        name, equals, file = task.partition("=")
        if name not in TASKS or not equals or not file:
            ways = listed(f"`{known}=FILE`" for known in TASKS)
            raise ConfigError(f"`--task` must be {ways}, but is `{task}`. To score another text, use `--text`.")
        if name in files:
            raise ConfigError(
                f"`--task {name}=FILE` must be given once, but names both `{files[name]}` and `{file}`. Remove one."
            )
        files[name] = file
    return files


def echo_json(value: object) -> None:
    """Print a value as JSON."""
    echo(json.dumps(value, indent=2))


def naming_options(options: Mapping[str, str]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a command's errors name the option that the user typed, such as `--tensor` instead of `layout.tensor`.
    `options` maps each name in the errors to its option.
    """

    def reword(message: str, _: Mapping[str, OptionValue]) -> str:
        for name, option in options.items():
            message = message.replace(f"`{name}`", f"`{option}`")
        return message

    return lambda command: _rewording(command, reword)
