"""The benchmark of text runs, and its contenders write the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "models" / "generate.py"


def test_both_programs_write_the_same_texts():
    command = [sys.executable, str(BENCHMARK), "--tiny", "--rounds", "1", "--prompt", "8", "--new", "12", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = {(row["program"], row["batch_size"]): row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {(program, size) for program in ("crosscut", "transformers") for size in (1, 8)}
    for size in (1, 8):
        assert rows["crosscut", size]["texts"] == rows["transformers", size]["texts"]
        assert [len(text) for text in rows["crosscut", size]["texts"]] == [12] * size
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["peak_bytes"] > 0
