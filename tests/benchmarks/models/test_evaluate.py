"""The benchmark of an evaluation runs, and its contenders agree on the scores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "models" / "evaluate.py"


def test_all_contenders_score_the_same_windows():
    command = [sys.executable, str(BENCHMARK), "--tiny", "--rounds", "1", "--warmup", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer["figures"]) == {"crosscut", "transformers labels", "transformers kept"}
    for figures in answer["figures"].values():
        assert figures["tokens_per_second"] > 0
        assert figures["peak_bytes"] > 0
    assert set(answer["ratios"]) == {"speed", "memory"}
