"""The tokenization benchmark runs."""

import json
from pathlib import Path

import pytest

from benchmarks.corpus.tokenization import main


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "A line of text, and more of the same kind of text."}\n' * 100, encoding="utf-8")
    return path


@pytest.mark.slow  # a whole benchmark
def test_tiny_run_reports_speed_and_memory(text, tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("psutil", reason="memory is measured with psutil, from the extra `benchmarks`")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # which the benchmark changes
    report = tmp_path / "report.json"
    size = ["--megabytes", "0.05", "--turns", "2", "--workers", "1"]
    main(["--text", str(text), *size, "--memory", "--memory-megabytes", "0.05", "--json", str(report)])
    figures = json.loads(report.read_text())
    assert figures["speed"]["megabytes"] == pytest.approx(0.05, rel=0.01)
    assert len(figures["speed"]["ours_mb_per_s"]) == len(figures["speed"]["library_mb_per_s"]) == 2
    assert figures["speed"]["ratio"] == figures["speed"]["median_ours"] / figures["speed"]["median_library"]
    assert [entry["megabytes"] for entry in figures["memory"]] == [0.05]
    assert all(entry["peak_megabytes"] > 10 for entry in figures["memory"])
    out = capsys.readouterr().out
    assert "ratio" in out
    assert figures["machine"]["device"] in out


def test_engines_are_compared_on_every_document(text, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # which the benchmark changes
    report = tmp_path / "report.json"
    main(["--engines", "--text", str(text), "--workers", "1", "--json", str(report)])
    figures = json.loads(report.read_text())["engines"]
    assert (figures["engine"], figures["documents"], figures["differ"]) == ("gigatoken", 100, 0)
    assert figures["num_bytes"] == 100 * len("A line of text, and more of the same kind of text.")
    assert figures["ratio"] == figures["mb_per_s"] / figures["library_mb_per_s"]
    assert "0 documents differ" in capsys.readouterr().out
