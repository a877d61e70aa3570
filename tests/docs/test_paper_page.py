"""docs/paper.toml names files, names and commands that exist."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from tests.docs.test_tour import names_defined_in

ROOT = Path(__file__).parents[2]
ROWS = [row for part in tomllib.loads((ROOT / "docs" / "paper.toml").read_text())["part"] for row in part["row"]]
COMMANDS = sorted({row["command"] for row in ROWS})
RUNNABLE = r"crosscut (verify|plan|study scaling)\b"
"""Commands that take minutes at most. A study of quality trains for an hour."""
PLACES = " ".join(row["place"] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row["place"] for row in ROWS])
def test_a_row_names_code_and_files_that_exist(row: dict[str, str]) -> None:
    for file, name in (code.split(":") for code in row["code"]):
        assert name in names_defined_in(ROOT / "crosscut" / file)
    for word in shlex.split(row["command"]):
        assert not word.startswith("examples/") or (ROOT / word).is_file()


@pytest.mark.parametrize("place", [*(f"Figure {n}" for n in range(1, 8)), *(f"Table {n}" for n in range(1, 6))])
def test_every_figure_and_table_has_a_row(place: str) -> None:
    assert re.search(rf"{place}[ab]?\b", PLACES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_of_the_program(command: str) -> None:
    program, name, *words = shlex.split(command)
    assert program == "crosscut"
    subcommand = commands.get_command(None, name)
    if hasattr(subcommand, "get_command") and words:
        subcommand = subcommand.get_command(None, words.pop(0))
    assert subcommand is not None
    known = {option for parameter in subcommand.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.slow  # proofs and plans of models with billions of parameters
@pytest.mark.parametrize("command", [one for one in COMMANDS if re.match(RUNNABLE, one)])
def test_commands_that_need_no_files_of_the_reader_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(commands, shlex.split(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
