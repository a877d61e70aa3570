"""The benchmark of a training step runs on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "training" / "train_step.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_step_benchmark_compares_layouts_of_the_same_loss():
    told = run("--tiny", "--rounds", "2", "--warmup", "1", "--json", "--only", "crosscut", "crosscut tensor=2")
    figures = json.loads(told)["figures"]
    assert figures["crosscut"]["peak_bytes"] > 0
    assert abs(figures["crosscut"]["first_loss"] - figures["crosscut tensor=2"]["first_loss"]) < 1e-4
