"""The loss's work on an H100, from the code that is generated for it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "gpu" / "count_loss.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("options", [(), ("--vocabulary=51200", "--padding=943", "--soft-cap=30")], ids=str)
def test_the_loss_reads_logits_twice_and_writes_them_once(options: tuple[str, ...]) -> None:
    """It reads them once for the largest, the sum and the target, and once for the gradients, which overwrite them."""
    told = subprocess.run([sys.executable, PROGRAM, *options], capture_output=True, text=True, check=True).stdout
    assert told.startswith("2 launches 3.00 passes "), told
