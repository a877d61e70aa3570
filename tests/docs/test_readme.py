"""Statements of the front pages that the package can check."""

import re
import tomllib
from pathlib import Path

from benchmarks.size import handwritten_words
from crosscut.cli.main import commands
from crosscut.config.system.extras import EXTRAS

ROOT = Path(__file__).parents[2]
README, INSTALL, INDEX = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/install.md", "docs/README.md")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_extras_are_those_of_the_package() -> None:
    table = INSTALL.partition("| extra | for |")[2].partition("\n\n")[0]
    named = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", table, re.MULTILINE))
    assert named == EXTRAS
    assert sorted(named) == sorted(name for name in PROJECT["optional-dependencies"] if "benchmarks" not in name)


def test_the_python_version_is_that_of_the_package() -> None:
    assert f"You need Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in README


def test_the_index_lists_every_page_and_command() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)[#)]", INDEX))
    assert sorted(linked) == sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")
    table = INDEX.partition("| command | what it does |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == sorted(commands.commands)


def test_the_readme_is_short() -> None:
    assert handwritten_words(README) <= 1200
