"""What the commands that take a run have in common: its file and the overrides after it."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import click

from crosscut.config import RunConfig, load_run

_Command = TypeVar("_Command", bound=Callable[..., Any])

DEMO_RUN = "demo.toml"


def run_arguments(command: _Command) -> _Command:
    """Give a command the arguments `[RUN.toml] [section.key=value ...]`, as one tuple named `arguments`."""
    return click.argument("arguments", nargs=-1, metavar="[RUN.toml] [section.key=value ...]")(command)


def run_from(arguments: tuple[str, ...]) -> RunConfig:
    """The run that the arguments describe; without a file, the demo that comes with Crosscut."""
    if arguments and "=" not in arguments[0]:
        return load_run(Path(arguments[0]), arguments[1:])
    return load_run(Path(str(files("crosscut.config") / DEMO_RUN)), arguments)
