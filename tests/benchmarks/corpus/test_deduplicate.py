"""The deduplication benchmark runs on a small corpus, without the peers."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_tiny_run_reports_recall_speed_and_memory(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="memory is measured with psutil, from the extra `benchmarks`")
    chance = random.Random(0)
    vocabulary = [f"word{number}" for number in range(5000)]
    with (tmp_path / "books.jsonl").open("w") as file:
        for _ in range(8):
            file.write(json.dumps({"text": " ".join(chance.choices(vocabulary, k=40_000))}) + "\n")
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "benchmarks/corpus/deduplicate.py",
        str(tmp_path / "books.jsonl"),
        "--tiny",
        "--json",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    assert figures["megabytes"] == pytest.approx(1, rel=0.1)
    assert figures["twice"]["megabytes"] == pytest.approx(2, rel=0.1)
    quality = figures["quality"]
    assert quality["dropped"]["right"] == quality["dropped"]["documents"] > 0
    assert all(found == planted for tenth, (found, planted) in quality["planted"].items() if float(tenth) >= 0.8)
    assert all(found == 0 for tenth, (found, planted) in quality["planted"].items() if float(tenth) < 0.7)
    assert quality["sample"]["found"] == quality["sample"]["pairs"] > 0
    assert [row["peak_bytes"] > 10e6 for row in figures["turns"]["crosscut"]] == [True, True]
    assert "recall at 0.7 and above: 1.0000" in done.stdout
