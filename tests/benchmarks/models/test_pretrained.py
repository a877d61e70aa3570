"""The benchmark of reading published models runs, and its ranks hold what they should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "models" / "pretrained.py"


@pytest.mark.skipif(sys.platform != "linux", reason="reads its memory from /proc")
def test_each_rank_has_its_share():
    command = [sys.executable, str(BENCHMARK), "--tiny", "--tensor", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)["ranks"]
    whole = 2 * 512 * 64 + 2 * (8 + 8 + 2 * 4) * 8 * 64 + 2 * 3 * 128 * 64
    norms = 5 * 64
    assert [rank["share"] for rank in ranks] == [4 * (whole // 2 + norms)] * 2
    assert [rank["slice"] for rank in ranks] == [4 * 256 * 64] * 2
