"""Programs of `benchmarks/`, run as a user runs them."""

import subprocess
import sys
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
