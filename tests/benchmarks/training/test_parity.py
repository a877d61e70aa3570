"""Parity is measured over combinations, and a run that differs is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "training" / "parity.py"


@pytest.mark.slow
def test_combinations_agree_with_the_plain_run(tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--steps", "3", "--tensor", "1", "2", "--json", str(figures)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert len(found["plain"]) == 3
    runs = [row for row in found["runs"] if row["limit"] == 1e-5]
    assert len(runs) == len({tuple(row["run"]) for row in runs}) == 36
    assert all(row["difference"] <= row["limit"] for row in found["runs"])
    assert "tensor 2 x data 2, sequence parallel, zero3" in done.stdout


def test_what_differs_is_named_and_fails(monkeypatch, capsys):
    from benchmarks.training import parity

    assert parity.largest_difference([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert parity.largest_difference([1.0, 2.5], [1.5, 2.0]) == 0.5
    row = {"run": ("layout.tensor=2",), "layout": "tensor 2 x data 1", "difference": float("inf"), "limit": 1e-5}
    monkeypatch.setattr(parity, "measure", lambda options: ([5.0], [row]))
    assert parity.main(["--steps", "1"]) == 1
    assert "differs by inf: layout.tensor=2" in capsys.readouterr().out
    row["difference"] = 1e-6
    assert parity.main(["--steps", "1"]) == 0
