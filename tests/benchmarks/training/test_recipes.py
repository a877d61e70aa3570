"""The benchmark of recipes trains, and its table has the figures of the runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "training" / "recipes.py"


@pytest.mark.slow
def test_both_recipes_have_the_same_flops_and_a_figure(tmp_path):
    figures, picture = tmp_path / "figures.json", tmp_path / "recipes.png"
    command = [sys.executable, str(BENCHMARK), "study", "--tflop", "0.1", "--seeds", "1", "--points", "1"]
    done = subprocess.run(
        [*command, "--json", str(figures), "--figure", str(picture)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = json.loads(figures.read_text())["runs"]
    (paper,), (modern,) = runs["paper"], runs["modern"]
    spent = {one["steps"] * one["flops_per_step"] for one in (paper, modern)}
    assert max(spent) <= 0.1e12
    assert min(spent) >= 0.08e12
    assert paper["bits_per_byte"] == min(one["bits_per_byte"] for one in runs["rates"])
    assert picture.read_bytes().startswith(b"\x89PNG")
