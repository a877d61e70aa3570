"""The measured activations of a tiny model's layers are equal to the formulas."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "training" / "memory.py"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    file = tmp_path_factory.mktemp("memory") / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--tiny", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "The published formulas assume" in done.stdout
    return json.loads(file.read_text())


def test_the_planner_knows_what_a_layer_keeps(tables):
    rows = tables["activations"]
    assert len(rows) == 2 * 2 * 5  # layouts, dropout, recomputation
    for row in rows:
        assert row["held"] == pytest.approx(row["planned"], rel=0.001), row


def test_recomputing_the_core_leaves_what_is_published_for_it(tables):
    for row in tables["activations"]:
        if row["recompute"] == "selective":
            assert row["held"] - row["weights"] == pytest.approx(row["published"], rel=0.1), row
        if row["recompute"].startswith("full"):
            assert row["held"] == row["published"]


def test_each_setting_keeps_less_than_the_one_before(tables):
    without_dropout = [row["held"] for row in tables["activations"] if not row["dropout"]]
    for none, selective, operators, full, offloaded in (without_dropout[:5], without_dropout[5:]):
        assert none > selective > operators > full
        assert offloaded == full  # on the CPU
