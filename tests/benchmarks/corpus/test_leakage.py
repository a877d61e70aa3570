"""The benchmark of leakage runs, and finds a passage that was copied by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.corpus.leakage import main

PASSAGE = "nobody but the old ferryman knew where the bell of the drowned church was ringing"


def test_tiny_run_reports_the_passage_and_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("psutil", reason="memory is measured with psutil, from the extra `benchmarks`")
    texts, questions, report = tmp_path / "texts.jsonl", tmp_path / "questions.jsonl", tmp_path / "report.json"
    filler = "A line of text, and more of the same kind of text. " * 100
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in (filler, f"{filler}{PASSAGE}.", filler)))
    questions.write_text(json.dumps({"text": f"Where? {PASSAGE}."}) + "\n")
    options = ["--pages", "3000", "--workers", "1", "--json", str(report)]
    main([str(texts), "--test-sets", str(questions), *options])
    figures = json.loads(report.read_text())
    (table,) = figures["overlap"]["test_sets"].values()
    assert (table["grams"], table["grams_found"], table["documents_touched"]) == (9, 8, 1)
    assert figures["removed"]["documents_in"] == 6
    assert figures["removed"]["cut"]["places"] == 1
    assert figures["mb_per_s"] > 0 and figures["peak_bytes"] > 1e7
    assert f"item 1, texts/texts.jsonl#2-2: {PASSAGE}" in capsys.readouterr().out
