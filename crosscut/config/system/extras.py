"""Command that installs the packages of an extra. Every message about a missing package names this command."""

import os
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[3]
"""Folder that contains the package: the checkout, or the environment's folder of installed packages."""


def install_command(extra: str) -> str:
    """Command that installs the packages of `extra` into the environment of this program.

    From a checkout, the command installs the checkout again, with the extra. Otherwise, the command names the packages,
    because Crosscut is not published in an index of packages.
    """
    if (_SOURCE / "pyproject.toml").is_file():
        return install_packages("-e", f"{_from_here(_SOURCE)}[{extra}]")
    lines = [line.partition(";") for line in metadata.requires("crosscut") or ()]
    packages = [name.strip() for name, _, when in lines if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", when)]
    return install_packages(*packages)


def install_packages(*words: str) -> str:
    """Command that installs packages into the environment of this program, given the words after `install`."""
    return shlex.join([_from_here(Path(sys.executable)), "-m", "pip", "install", *words])


def _from_here(path: Path) -> str:
    """Path relative to the working directory, if the path lies in this directory."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
