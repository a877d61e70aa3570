"""The crash benchmark in its short form: it kills real runs, so it takes a minute."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
def test_killed_run_ends_as_the_unharmed_one(tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery" / "crash.py"), "--kills", "3", "--json", str(figures)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(figures.read_text())
    assert told["well"]
    assert told["damaged"] == []
    assert [kill["target"] for kill in told["kills"]] == ["launcher", "rank 0", "rank 1"]
    assert max(kill["lost"] for kill in told["kills"]) <= 4
    assert told["compared"] >= 3
    for expected in ("3 kills in", "steps lost: at most", "0 differ", "the killed run ended like the unharmed one"):
        assert expected in done.stdout, expected


@pytest.mark.slow
def test_number_of_kills_is_checked():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery" / "crash.py"), "--kills", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "`--kills` must be at least 1, but is 0." in done.stderr
