"""The sdist and the wheel of this checkout, and environments into which the wheel is installed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({folder!r}))"


class Packages(NamedTuple):
    """The files that `pip` can install."""

    sdist: Path
    wheel: Path


def tracked(*places: str) -> list[str]:
    """Files that git tracks and that exist, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """The sdist of the tracked files, and the wheel of the unpacked sdist, built in the order of `python -m build`."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout, since git says which files belong to the package")
    folder = tmp_path_factory.mktemp("packages")
    checkout, built = folder / "checkout", folder / "built"
    for name in tracked():
        copy = checkout / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    sdist = built / _build("sdist", checkout, built)
    subprocess.run(["tar", "--extract", "--file", sdist, "--directory", folder], check=True)
    wheel = built / _build("wheel", folder / sdist.name.removesuffix(".tar.gz"), built)
    return Packages(sdist, wheel)


def _build(kind: str, source: Path, folder: Path) -> str:
    """Name of the file that setuptools makes of the folder `source`. A process of its own has no other settings."""
    code = BUILD.format(kind=kind, folder=str(folder))
    told = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()[-1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty folder to work in."""

    folder: Path
    work: Path

    def run(self, program: str, *arguments: str | Path, timeout: float = 120) -> str:
        """Run a program of the environment in the empty folder. The program must succeed. Return what it printed."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RANK"))}
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.work,
            env=inherited | {"VIRTUAL_ENV": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def site_packages(self) -> Path:
        """Folder of the installed packages."""
        return Path(self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """Empty folder on a disk. The folders of other tests may lie in memory, which PyTorch with CUDA would fill."""
    with tempfile.TemporaryDirectory(prefix="crosscut-", dir="/var/tmp") as folder:
        yield Path(folder)
