"""What commands have in common: a run's file and the overrides after it; what asks a model."""

from collections.abc import Callable, Mapping
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from crosscut.config import CrosscutError, RunConfig, load_run
from crosscut.config.precision import PRECISIONS

_Command = TypeVar("_Command", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")

DEMO_RUN = "demo.toml"

_OF_MODELS = [name for name, precision in PRECISIONS.items() if precision.products == precision.compute]
"""Weights can be held in these; float8 is only for products in training."""


def run_arguments(command: _Command) -> _Command:
    """Give a command the arguments `[RUN.toml] [section.key=value ...]`, as one tuple named `arguments`."""
    return click.argument("arguments", nargs=-1, metavar="[RUN.toml] [section.key=value ...]")(command)


def run_from(arguments: tuple[str, ...]) -> RunConfig:
    """The run that the arguments describe; without a file, the demo that comes with Crosscut."""
    if arguments and "=" not in arguments[0]:
        return load_run(Path(arguments[0]), arguments[1:])
    return load_run(Path(str(files("crosscut.config") / DEMO_RUN)), arguments)


def precision_option(command: _Command) -> _Command:
    """Give a command that asks a model the option `--precision`, of its weights and products."""
    return click.option("--precision", type=click.Choice(_OF_MODELS), default="float32", show_default=True)(command)


def naming_options(options: Mapping[str, str]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let errors of a command name the options that were typed: each by the name that the error has for it."""

    def of(command: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(command)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return command(*args, **kwargs)
            except CrosscutError as error:
                message = str(error)
                for name, option in options.items():
                    message = message.replace(f"`{name}`", f"`{option}`")
                error.args = (message,)
                raise

        return run

    return of
