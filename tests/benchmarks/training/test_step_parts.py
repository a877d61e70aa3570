"""The benchmark of the parts of a step runs on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "training" / "step_parts.py"


@pytest.mark.slow  # four processes that import torch; the benchmark has no other test
def test_all_parts_of_a_step_are_timed_in_both_programs() -> None:
    command = [sys.executable, str(BENCHMARK), "--tiny", "--turns", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ((_, programs),) = json.loads(done.stdout)["milliseconds"].items()
    for name, parts in programs.items():
        assert all(parts[part] > 0.0 for part in ("batch", "forward", "backward", "clip", "optimizer")), name
        assert parts["forward"] + parts["backward"] < parts["step"]
