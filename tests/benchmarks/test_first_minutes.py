"""The benchmark of the first minutes runs on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "first_minutes.py"


@pytest.mark.slow
def test_first_minutes_benchmark_trains_the_same_model_in_both_programs():
    command = [sys.executable, str(BENCHMARK), "--tiny", "--turns", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout)["programs"]
    crosscut, plain = (programs[name]["losses"][0] for name in ("crosscut", "plain"))
    assert crosscut == pytest.approx(plain, rel=0.05)  # near the loss of a uniform guess, of other weights and windows
