"""The benchmark of cleaning runs, and tells documents that differ."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpus.clean import main


def clean(folder: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark and return its figures."""
    main([*options, "--json", str(folder / "report.json")])
    return json.loads((folder / "report.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow  # a whole benchmark
def test_tiny_run_reports_differences_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "1.txt").write_bytes(b'Subject: caf\xe9\r\n\r\nA "quoted" word -- and Sm\xf6rg\xe5sbord.\r\n')
    (tmp_path / "mail" / "2.txt").write_text("Plain.\n", encoding="utf-8")
    figures = clean(tmp_path, "--mail", str(tmp_path / "mail"), "--workers", "1")
    assert list(figures["repair"]) == ["mail", "mail, typeset", "mail, mis-decoded"]
    assert [(one["documents"], one["changed"], one["differ"]) for one in figures["repair"].values()] == [(2, 1, 0)] * 3
    assert figures["language"]["mail"]["documents"] == 2
    assert "mail, typeset" in capsys.readouterr().out


def test_tables_by_language_count_what_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zh.txt").write_text("\u597d\uff0c\u5bf9\u3002\n\u201c\u597d\u3002\u201d\n", encoding="utf-8")
    (tmp_path / "en.txt").write_text("One.\nTwo &amp; three.\n", encoding="utf-8")
    tables = clean(tmp_path, "--sentences", str(tmp_path), "--by-language")["by language"]
    chinese, english = tables["repair by language"]["zh"], tables["repair by language"]["en"]
    assert (chinese["right"], chinese["changed"], chinese["changed_by_ftfy"], chinese["planted"]) == (2, 0, 2, 2)
    assert (english["sentences"], english["right"], english["planted"]) == (2, 1, 0)
    steps = tables["changed by one step"]["zh"]
    assert {key: count for key, count in steps.items() if count} == {"fix_character_width": 1, "uncurl_quotes": 1}
    assert tables["ends of sentences"]["zh"] == {"sentences": 2, "end": 2, "found": 1, "wrong": 0, "joined": 0}
    assert "repair by language" in capsys.readouterr().out
