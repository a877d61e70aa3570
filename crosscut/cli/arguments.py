"""What the commands that take a run have in common: its file and the overrides after it."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import click

from crosscut.config import ConfigError, RunConfig, load_run

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


def require_file(option: str, path: Path) -> None:
    """Raise `ConfigError` unless a file can be written there; to be asked before the work. Leaves nothing behind."""
    try:
        if path.is_dir():
            raise ConfigError(f"`{option}` must name a file, but `{path}` is a folder. Name a file in it.")
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ConfigError(
            f"`{option}` must name a file that can be written, but is `{path}`: {error.strerror}. Make its folder, or "
            "name another."
        ) from None


def require_folder(option: str, path: Path) -> None:
    """Make the folder. Raise `ConfigError` unless it can be made and written in; to be asked before the work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"`{option}` must name a folder that can be written in, but is `{path}`: {error.strerror}. Name another."
        ) from None
