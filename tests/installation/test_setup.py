"""`.ci/setup`, which `make` runs first, with a `python` that prints how pip is called."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit
echo "pip $*"
case "$FAIL $*" in
"cpu "*+cpu*|"both "*torch*) echo "no such build" >&2; exit 1 ;;
esac
"""


def set_up(folder: Path, fail: str = "") -> subprocess.CompletedProcess[str]:
    for name, text in {
        ".venv/bin/python": PYTHON,
        ".venv/bin/pip": PYTHON,
        "bin/nvidia-smi": "#!/bin/sh\nexit 9",
    }.items():
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    (folder / "pins.txt").write_text("numpy==2.4\ntorch==2.13.0\n")
    return subprocess.run(
        ["sh", ROOT / ".ci/setup", ".venv", "dev", "pins.txt"],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "FAIL": fail},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_setup_says_first_what_it_installs_and_pip_shows_its_progress(tmp_path: Path) -> None:
    done = set_up(tmp_path)
    first, *calls = done.stdout.splitlines()
    assert first.startswith("Setting up `.venv`, once: PyTorch 2.13.0+cpu and about 2 packages")
    assert [call.rpartition("check ")[2] for call in calls] == [
        "torch==2.13.0+cpu",
        "--constraint pins.txt --editable .[dev]",
    ]
    assert "--quiet" not in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("fail", "status", "errors"), [("cpu", 0, ""), ("both", 1, "no such build\n" * 2)])
def test_the_first_error_of_pip_is_shown_only_if_the_second_place_fails(
    fail: str, status: int, errors: str, tmp_path: Path
) -> None:
    done = set_up(tmp_path, fail)
    assert (done.returncode, done.stderr) == (status, errors)
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" in done.stdout
