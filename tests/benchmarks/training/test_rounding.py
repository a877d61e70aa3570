"""The benchmark measures the rounding of each model in narrow types, and reports differences that the proof does not
allow.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "training" / "rounding.py"


@pytest.mark.slow  # trains in every precision
def test_a_model_is_measured_in_every_precision(tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--models", "1", "--seeds", "1", "--json", str(figures)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures.read_text())
    assert [row["precision"] for row in rows] == ["float16", "bfloat16", "float8"]
    of_outputs, of_gradients = ([row[kind] for row in rows] for kind in ("outputs", "gradients"))
    assert 1e-4 < of_outputs[0] < of_outputs[1] < of_outputs[2] < 0.5
    assert 1e-4 < of_gradients[0] < of_gradients[1] < of_gradients[2] < 0.5
    assert f"{of_gradients[2]:.4f}" in done.stdout


def test_what_the_proof_does_not_allow_is_told_and_fails(monkeypatch, capsys):
    from benchmarks.training import rounding

    rows = [
        {"model": "a", "precision": precision, "outputs": 0.1, "gradients": gradients, "failed": []}
        for precision, gradients in (("float16", 0.2), ("bfloat16", 0.25), ("float8", 0.75))
    ]
    monkeypatch.setattr(rounding, "measure", lambda models, num_seeds: rows)
    assert rounding.main([]) == 0
    rows[2]["failed"] = ["seed 0: rounding of gradients, gradient of b"]
    assert rounding.main([]) == 1
    told = capsys.readouterr().out
    assert "0.1000 / 0.7500" in told
    assert "a, float8, seed 0: rounding of gradients, gradient of b" in told
