"""The deduplication benchmark runs on small corpora, without the peers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.benchmarks.conftest import BENCHMARKS, run_program


@pytest.mark.slow
def test_tiny_run_reports_recall_speed_and_memory(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="memory is measured with psutil, from the extra `benchmarks`")
    chance = random.Random(0)
    vocabulary = [f"word{number}" for number in range(5000)]
    with (tmp_path / "books.jsonl").open("w") as file:
        for _ in range(8):
            file.write(json.dumps({"text": " ".join(chance.choices(vocabulary, k=40_000))}) + "\n")
    with zstandard.open(tmp_path / "manuals.jsonl.zst", "wt") as file:
        for number in range(60):  # pages of one template
            page = [*vocabulary[:200], *chance.choices(vocabulary, k=10 + number)]
            file.write(json.dumps({"text": " ".join(page)}) + "\n")
    report = tmp_path / "report.json"
    options = ("--tiny", "--manuals", tmp_path, "--before", BENCHMARKS.parent, "--workers", 1, "--json", report)
    done = run_program("corpus/deduplicate.py", tmp_path / "books.jsonl", *options)
    figures = json.loads(report.read_text())
    check_books(figures)
    assert "recall at 0.7 and above: 1.0000" in done.stdout
    manuals = figures["manuals"]
    assert manuals["documents"] == 60
    assert manuals["same as before"]
    quality = manuals["quality"]
    assert quality["dropped"]["right"] == quality["dropped"]["documents"] > 50
    assert quality["sample"]["one goes"]["crosscut"] == quality["sample"]["pairs"] > 1000
    assert all(row["cpu"] > 0.1 for rows in manuals["turns"].values() for row in rows)
    assert sum(stage["cpu"] for stage in quality["stages"].values()) > 0.01


def check_books(figures: dict[str, Any]) -> None:
    books = figures["books"]
    assert books["megabytes"] == pytest.approx(1, rel=0.1)
    assert figures["twice"]["megabytes"] == pytest.approx(2, rel=0.1)
    quality = books["quality"]
    assert quality["dropped"]["right"] == quality["dropped"]["documents"] > 0
    assert all(found == planted for tenth, (found, planted) in quality["planted"].items() if float(tenth) >= 0.8)
    assert all(found == 0 for tenth, (found, planted) in quality["planted"].items() if float(tenth) < 0.7)
    assert quality["sample"]["found"] == quality["sample"]["pairs"] > 0
    assert [row["peak_bytes"] > 10e6 for row in books["turns"]["crosscut"]] == [True, True]
