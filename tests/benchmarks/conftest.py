"""Programs of `benchmarks/`, run as a user runs them, and small checkouts that they look at."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_program(
    program: str, *arguments: object, status: int | None = 0, timeout: float = 280, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program, which must end with this status; with any status if it is None."""
    command = [sys.executable, str(BENCHMARKS / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def run_python(program: str, *arguments: object, **variables: str) -> str:
    """Output of a program, given as text, in a process with further environment variables."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files by their names in a folder, and return the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
