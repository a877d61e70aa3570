"""The benchmark of leakage runs, and finds a passage that was copied by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PASSAGE = "nobody but the old ferryman knew where the bell of the drowned church was ringing"


def test_tiny_run_reports_the_passage_and_what_it_took(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="memory is measured with psutil, from the extra `benchmarks`")
    texts, questions, report = tmp_path / "texts.jsonl", tmp_path / "questions.jsonl", tmp_path / "report.json"
    filler = "A line of text, and more of the same kind of text. " * 100
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in (filler, f"{filler}{PASSAGE}.", filler)))
    questions.write_text(json.dumps({"text": f"Where? {PASSAGE}."}) + "\n")
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "corpus" / "leakage.py"),
        str(texts),
        "--test-sets",
        str(questions),
    ]
    options = ["--pages", "3000", "--workers", "1", "--json", str(report)]
    process = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    figures = json.loads(report.read_text())
    (table,) = figures["overlap"]["test_sets"].values()
    assert (table["grams"], table["grams_found"], table["documents_touched"]) == (9, 8, 1)
    assert figures["removed"]["documents_in"] == 6
    assert figures["removed"]["cut"]["places"] == 1
    assert figures["mb_per_s"] > 0 and figures["peak_bytes"] > 1e7
    assert f"item 1, texts/texts.jsonl#2-2: {PASSAGE}" in process.stdout
