"""The installed wheel, in environments without this checkout: it says what the machine has, trains and shows."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import crosscut
from tests.installation.conftest import ROOT, Environment, Packages

SMALLER = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "data.vocab_size=300",
    "training.steps=2",
    "training.validation_sequences=8",
    "output.sample_tokens=5",
)
"""Settings that make the demo a run of seconds."""

CONSTRAINTS = ROOT / "constraints.txt"
TORCH = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)[0]
WITHOUT_TORCH = ("click", "fsspec", "numpy", "rich", "tokenizers", "tomli-w", "zstandard")
"""Dependencies of the commands that need no torch."""
ROOM = 15 * 10**9
"""Bytes that the disk must have free for the build of PyTorch with CUDA, and for its download."""


def check_without_torch(installed: Environment) -> None:
    """The package is the installed one, and commands that need no torch find its files."""
    code = "import crosscut; print(crosscut.__file__)"
    assert Path(installed.run("python", "-c", code).strip()).is_relative_to(installed.site_packages())
    assert installed.run("crosscut", "--version").split()[-1] == crosscut.__version__
    installed.run("crosscut", "new", "run.toml", "--gpus", "none", "--size", "3M", "--tokens", "1M", "--data", "demo")
    assert "1 x a laptop's processor" in installed.run("crosscut", "plan", "run.toml", "--gpu", "laptop")
    assert "all_reduce over 2 tensor ranks" in installed.run("crosscut", "show", "demo", "--layout", "tensor=2")


def check(installed: Environment) -> None:
    """The three commands of a newcomer, from an empty folder."""
    assert "cpu, with gloo between ranks" in installed.run("crosscut", "doctor")
    installed.run("crosscut", "train", *SMALLER)
    config = tomllib.loads((installed.work / "runs/demo/config.toml").read_text(encoding="utf-8"))
    assert config["data"]["text"] == ["builtin:tales"]
    assert config["layout"]["tensor"] == 2
    shown = installed.run("crosscut", "show", "runs/demo")
    assert "all_reduce over 2 tensor ranks" in shown


@pytest.fixture(scope="module")
def borrowing(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment has the wheel and borrows all other packages, without the links to this checkout among them."""
    folder = tmp_path_factory.mktemp("borrowing")
    installed = Environment(folder / "venv", folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", installed.folder], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", installed.folder / "bin/python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", packages.wheel], check=True)
    borrowed = installed.site_packages() / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return installed


def test_the_wheel_runs_with_the_packages_of_this_environment(borrowing: Environment) -> None:
    check_without_torch(borrowing)


@pytest.mark.slow  # each of its programs imports torch
def test_the_wheel_trains_with_the_packages_of_this_environment(borrowing: Environment) -> None:
    check(borrowing)


@pytest.mark.slow  # downloads all dependencies; the test above finds what the wheel lacks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "version",
    ["3.11", *(pytest.param(version, marks=pytest.mark.extras) for version in ("3.12", "3.13"))],  # gigabytes of CUDA
)
def test_the_wheel_runs_in_an_empty_environment(version: str, packages: Packages, on_disk: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version}, neither on the PATH nor among those of pyenv")
    installed = Environment(on_disk / "venv", on_disk)
    subprocess.run([python, "-m", "venv", installed.folder], check=True)
    install_torch(installed)
    install(installed, packages.wheel)
    check_without_torch(installed)
    check(installed)


@pytest.mark.slow  # installs packages
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_commands_without_torch_run_on_other_versions(version: str, packages: Packages, on_disk: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version}, neither on the PATH nor among those of pyenv")
    installed = Environment(on_disk / "venv", on_disk)
    subprocess.run([python, "-m", "venv", installed.folder], check=True)
    installed.run("python", "-m", "pip", "install", "--quiet", "--no-deps", packages.wheel)
    install(installed, *WITHOUT_TORCH)
    check_without_torch(installed)
    installed.run("crosscut", "prepare", "run.toml")


def interpreter(version: str) -> str | None:
    """Path of an interpreter of this version, from the PATH or from pyenv. None if there is none that starts."""
    root = os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")
    of_pyenv = sorted(Path(root, "versions").glob(f"{version}.*/bin/python{version}"))
    for found in (sys.executable, shutil.which(f"python{version}"), *of_pyenv):
        if found and _version(found) == version:
            return str(found)
    return None


def _version(python: str | Path) -> str:
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def install_torch(installed: Environment) -> None:
    """Install PyTorch without CUDA as `.ci/setup` does or, if pip finds no such build, with CUDA."""
    if not can_install(installed, f"torch=={TORCH}+cpu"):
        if (free := shutil.disk_usage(installed.folder).free) < ROOM:
            pytest.skip(
                f"pip finds no PyTorch without CUDA, and there are only {free / 1e9:.0f} GB for the other build"
            )
        install(installed, f"torch=={TORCH}")


def can_install(installed: Environment, *packages: str) -> bool:
    """Install packages, if pip finds them. Return whether pip found them."""
    command = [installed.folder / "bin/python", "-m", "pip", "install", "--quiet", *packages]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install(installed: Environment, *packages: str | Path) -> None:
    """Install packages and their dependencies, in the versions with which the tests run."""
    installed.run("python", "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *packages, timeout=600)
