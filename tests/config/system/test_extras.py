"""Command that installs an extra."""

import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from crosscut.config.system import extras
from crosscut.config.system.extras import install_command

ROOT = Path(__file__).parents[3]
OWN = "crosscut/config/system/extras.py"
SPELLINGS = ("pip install", "crosscut[")


def test_command_in_a_checkout_names_the_checkout_and_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    python, *rest = shlex.split(install_command("serve"))
    told = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == sys.prefix
    assert rest == ["-m", "pip", "install", "-e", f"{ROOT}[serve]"]
    monkeypatch.chdir(ROOT)
    assert install_command("serve").endswith("-m pip install -e '.[serve]'")


def test_command_of_an_installed_package_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(extras, "_SOURCE", tmp_path)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = [f"{name}; extra == '{extra}'" for extra, names in table.items() for name in names]
    monkeypatch.setattr(metadata, "requires", lambda name: ["click>=8.1", *required])
    for extra in ("serve", "careful", "s3"):
        python, *rest = shlex.split(install_command(extra))
        assert Path(python).absolute() == Path(sys.executable)
        assert rest == ["-m", "pip", "install", *table[extra]]


def test_no_other_place_spells_the_command():
    files = [path for path in (ROOT / "crosscut").rglob("*.py") if path != ROOT / OWN]
    found = [str(path) for path in files if any(text in path.read_text(encoding="utf-8") for text in SPELLINGS)]
    assert not found, f"import `install_command` from {OWN} instead"


def test_pages_name_no_published_package():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        assert "crosscut[" not in page.read_text(encoding="utf-8"), f"{page}: write pip install -e '.[EXTRA]'"


def test_every_extra_that_a_message_names_exists():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "crosscut").rglob("*.py")]
    named = {part[1:].partition(part[0])[0] for text in texts for part in text.split("install_command(")[1:]}
    assert {name for name in named if name.isalpha()} - {"xtra"} <= table.keys() and "serve" in named
