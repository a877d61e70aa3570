import time
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from crosscut import __version__
from crosscut.cli.main import commands
from tests.cli.conftest import run_python
from tests.timing import quickest


def test_help_is_quick_and_imports_no_torch():
    def ask() -> None:
        done = run_python("-m", "crosscut", "--help")
        assert done.returncode == 0
        assert "train" in done.stdout

    assert quickest(ask, limit=0.5, clock=time.perf_counter) < 0.5
    imports = run_python("-X", "importtime", "-m", "crosscut", "train", "--help").stderr
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in imports.splitlines() if "|" in line}
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "rich", "matplotlib", "tokenizers"}


def test_every_command_has_help():
    for command in ("plan", "train", "prepare", "evaluate", "generate", "embed", "serve", "study"):
        done = CliRunner().invoke(commands, [command, "--help"], prog_name="crosscut")
        assert done.exit_code == 0
        assert done.stdout.startswith(f"Usage: crosscut {command}")


def test_every_option_has_help():
    def options(command: click.Command, name: str) -> Iterator[tuple[str, str | None]]:
        if isinstance(command, click.Group):
            for each, inner in command.commands.items():
                yield from options(inner, f"{name} {each}")
        for option in command.params:
            if isinstance(option, click.Option):
                yield f"{name} {option.opts[0]}", option.help

    found = dict(options(commands, "crosscut"))
    assert "crosscut generate --device" in found
    assert [name for name, told in found.items() if not told] == []


@pytest.mark.parametrize("command", ["evaluate", "generate", "embed", "serve"])
def test_a_model_is_asked_in_types_that_hold_weights(command):
    (option,) = (option for option in commands.commands[command].params if option.name == "precision")
    assert list(option.type.choices) == ["float32", "bfloat16", "float16", "float64"]


def test_version_is_told():
    assert CliRunner().invoke(commands, ["--version"]).stdout.strip().endswith(__version__)
