"""The benchmark of masked samples runs."""

from pathlib import Path

import pytest

from benchmarks.corpus.masked_samples import main


def test_tiny_run_reports_the_rate_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One sentence is here. Another one follows it. And a third!\n\n" * 500)
    main(["--text", str(text), "--sequence-length", "32", "--batch-size", "4", "--turns", "2"])
    machine, *lines = capsys.readouterr().out.splitlines()
    assert "numpy" in machine
    assert [line.split()[0] for line in lines] == ["causal", "pairs", "packed"]
    assert all(float(line.split()[1]) > 0 for line in lines)
