"""Statements of the README that the package can check."""

import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_extras_are_those_of_the_package() -> None:
    table = README.partition("| extra | for |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(name for name in PROJECT["optional-dependencies"] if "benchmarks" not in name)


def test_the_python_version_is_that_of_the_package() -> None:
    assert f"You need Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in README


@pytest.mark.slow  # a search of the size that a reader may have
def test_the_plan_is_what_the_command_prints() -> None:
    section = README.partition("## Plan before you pay")[2]
    command = re.search(r"^\.venv/bin/crosscut (plan .*)$", section, re.MULTILINE)
    assert command
    told = section.partition("```text\n")[2].partition("```")[0].splitlines()
    printed = CliRunner().invoke(commands, command[1].split(), catch_exceptions=False).stdout
    lines = {line.rstrip() for line in printed.splitlines()}
    assert [line for line in told if line != "..." and line not in lines] == []
    assert len(told) > 10
