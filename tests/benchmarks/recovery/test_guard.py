"""The benchmark measures the cost of comparing replicas, which stays below its limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
def test_comparing_replicas_costs_less_than_half_a_percent(tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery" / "guard.py"), "--repeats", "5", "--json", str(figures)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["layouts"]
    assert set(rows) == {"tensor 2", "data 2"}
    for row in rows.values():
        assert row["every"] == 100
        assert row["cost"] == pytest.approx(row["comparison"] / (100 * row["step"]))
        assert row["cost"] < 0.005
    assert "comparison ms" in done.stdout


@pytest.mark.slow  # starts a process for one message
def test_missing_device_is_told():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery" / "guard.py"), "--device", "cuda"],
        capture_output=True, text=True, timeout=120, check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BENCHMARKS.parent)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "`--device` must be available on this machine" in done.stderr
