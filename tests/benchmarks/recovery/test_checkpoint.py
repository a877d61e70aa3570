"""The benchmark of checkpoints runs on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "recovery" / "checkpoint.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_checkpoint_benchmark_runs(tmp_path):
    figures = json.loads(run("--tiny", "--rounds", "1", "--json", "--folder", str(tmp_path)))
    saving = figures["saving"]["rounds"]
    assert {"held", "copy", "torch.save", "until written"} <= set(saving)
    assert 0 < saving["held"][0] < saving["until written"][0]
    reading = figures["reading"]
    assert [len(reading[layout]) for layout in ("tensor 4 x data 1", "tensor 1 x data 1")] == [4, 1]
    shares = [rank["share"] for rank in reading["tensor 4 x data 1"]]
    assert max(shares) < reading["tensor 1 x data 1"][0]["share"] / 2
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
