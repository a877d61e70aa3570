"""Statements of the README that the package can check."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_extras_are_those_of_the_package() -> None:
    table = README.partition("| extra | for |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(name for name in PROJECT["optional-dependencies"] if "benchmarks" not in name)


def test_the_python_version_is_that_of_the_package() -> None:
    assert f"You need Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in README
