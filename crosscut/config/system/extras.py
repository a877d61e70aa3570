"""The extras: what they are for, what they lack, and the command that installs them. Every message about a missing
package names this command.
"""

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "serve": "`serve`",
        "corpus": "`prepare` for a corpus, also from parquet",
        "parquet": "text in parquet files",
        "s3": "sources and checkpoints in S3",
        "ray": "`prepare` on a Ray cluster",
        "careful": '`html.extraction = "careful"` in `prepare`',
        "langdetect": "the paper's language detector in `prepare`",
        "harness": "the tasks of EleutherAI's lm-eval in `evaluate`",
        "dev": "everything that the tests need",
    }
)
"""Purpose of each extra."""

_SOURCE = Path(__file__).resolve().parents[3]
"""Folder that contains the package: the checkout, or the environment's folder of installed packages."""


def install_command(extra: str) -> str:
    """Command that installs the packages of `extra` into the environment of this program.

    From a checkout, the command installs the checkout again, with the extra. Otherwise, the command names the packages,
    because Crosscut is not published in an index of packages.
    """
    if (_SOURCE / "pyproject.toml").is_file():
        return install_packages("-e", f"{_from_here(_SOURCE)}[{extra}]")
    return install_packages(*_packages(extra))


def missing_packages(extra: str) -> list[str]:
    """Names of the packages of `extra` that are not installed."""
    names = [re.split(r"[\s<>=!~\[;]", package, maxsplit=1)[0] for package in _packages(extra)]
    return [name for name in names if not _is_installed(name)]


def _packages(extra: str) -> list[str]:
    """Packages of an extra with their versions, such as `pyarrow>=17`."""
    if (project := _SOURCE / "pyproject.toml").is_file():
        packages: list[str] = tomllib.loads(project.read_text("utf-8"))["project"]["optional-dependencies"][extra]
        return packages
    lines = [line.partition(";") for line in metadata.requires("crosscut") or ()]
    return [name.strip() for name, _, when in lines if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", when)]


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def install_packages(*words: str) -> str:
    """Command that installs packages into the environment of this program, given the words after `install`."""
    return shlex.join([_from_here(Path(sys.executable)), "-m", "pip", "install", *words])


def _from_here(path: Path) -> str:
    """Path relative to the working directory, if the path lies in this directory."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
