"""The command `crosscut new`: four questions, and a run file with comments."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from crosscut.cli.arguments import LocalPath, OptionValue
from crosscut.cli.new.answers import read_data, read_devices, read_size, read_tokens
from crosscut.config import ConfigError, CrosscutError, write_whole
from crosscut.config.system.files import require_writable_file


class _Question(NamedTuple):
    """One of the four questions."""

    words: str
    proposed: str
    read: Callable[[str], OptionValue]
    """Function that reads the answer. Raises `CrosscutError` for an answer without a meaning."""


_QUESTIONS = {
    "gpus": _Question("GPUs, such as `8 x h100`, or none", "none", read_devices),
    "size": _Question("Size of the model: parameters such as 125M, or a preset such as gpt2-small", "10M", read_size),
    "tokens": _Question("Tokens to train on, such as 300M, or auto for as many as suit the size", "auto", read_tokens),
    "data": _Question("Text or token shards: a file, a folder or a glob, demo, or none for later", "demo", read_data),
}


@click.command()
@click.argument("path", metavar="RUN.toml", type=LocalPath(path_type=Path))
@click.option("--gpus", metavar="'8 x h100'|none", help="Number and kind of the GPUs, or none for the CPU.")
@click.option("--size", metavar="125M|PRESET", help="Number of parameters of the model, or the name of a preset.")
@click.option(
    "--tokens",
    metavar="300M|auto",
    help="Number of tokens to train on. auto takes 20 for each parameter, but reads the data at most four times.",
)
@click.option(
    "--data",
    metavar="NAME|demo|none",
    help="File, folder or glob of text, folder of token shards, demo, or none to name them later.",
)
def new(path: Path, **typed: str | None) -> None:
    """Write a run file with comments, after four questions.

    An option answers its question in advance. The file has the fastest layout that leaves some of the devices' memory
    free, and every setting says why it is there. An existing file is never replaced. `crosscut plan --list` lists
    presets and devices. docs/install.md has an example.
    """
    if path.name == ".toml":
        raise ConfigError(
            f"`RUN.toml` must have a name before `.toml`, but is `{path}`. Try `{path.parent / 'run.toml'}`."
        )
    if path.exists() or path.is_symlink():
        raise ConfigError(f"`RUN.toml` must name a new file, but `{path}` exists. Choose another name.")
    require_writable_file("RUN.toml", path)
    answers = _answers(typed)
    from crosscut.cli.new.outcome import show_new_run
    from crosscut.cli.new.settings import new_run
    from crosscut.config.loading.commented import commented_toml

    made = new_run(f"runs/{path.stem}", *(read for _, read in answers.values()))
    options = " ".join(f"--{name} {shlex.quote(text)}" for name, (text, _) in answers.items())
    heading = (
        f"Written by: crosscut new {shlex.quote(str(path))} {options}",
        "docs/configuration.md explains these settings and all others.",
    )
    write_whole(path, commented_toml(made.settings, heading))
    show_new_run(path, made)


def _answers(typed: dict[str, str | None]) -> dict[str, tuple[str, OptionValue]]:
    """Text and meaning of the four answers. Options are read before the first question is asked."""
    given = {name: (text, _QUESTIONS[name].read(text)) for name, text in typed.items() if text is not None}
    missing = [name for name in _QUESTIONS if name not in given]
    if missing and not sys.stdin.isatty():
        names = ", ".join(f"`--{name}`" for name in missing)
        example = " ".join(f"--{name} {_QUESTIONS[name].proposed}" for name in missing)
        raise ConfigError(
            f"Options must answer all questions if no terminal can, but {names} {'is' if len(missing) == 1 else 'are'} "
            f"missing. Add, for example, {example}."
        )
    return {name: given.get(name) or _asked(question) for name, question in _QUESTIONS.items()}


def _asked(question: _Question) -> tuple[str, OptionValue]:
    """Ask a question until the answer has a meaning."""

    def read(text: str) -> tuple[str, OptionValue]:
        try:
            return text, question.read(text)
        except CrosscutError as error:
            raise click.UsageError(str(error)) from None

    answer: tuple[str, OptionValue] = click.prompt(question.words, default=question.proposed, value_proc=read)
    return answer
