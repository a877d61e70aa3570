"""`crosscut prepare` of a corpus tells what a user should know before the work begins."""

from pathlib import Path

import pytest

CORPUS = """
folder = "corpus"
[[sources]]
name = "web"
files = ["nowhere.jsonl"]
[duplicates]
against = ["earlier"]
[cleaning]
unicode = true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("corpus.toml").write_text(CORPUS)
    Path("earlier").mkdir()
    Path("earlier/config.toml").write_text('folder = "earlier"\n[[sources]]\nname = "web"\nfiles = ["web.jsonl"]\n')
    return tmp_path


def test_moved_key_and_other_repairs_of_an_earlier_corpus_are_told_in_a_line_each(crosscut_here, folder: Path) -> None:
    result = crosscut_here("prepare", "corpus.toml")
    moved, earlier, *_ = result.stderr.splitlines()
    assert moved.startswith("crosscut: `cleaning.unicode` is now one key per repair. true switches `fix_encoding`, ")
    assert earlier == (
        "crosscut: `earlier` in `duplicates.against` was cleaned with `cleaning.fix_character_width` false, "
        '`cleaning.fix_latin_ligatures` false, `cleaning.uncurl_quotes` false, `cleaning.normalization` "none", '
        "unlike this corpus. Where these settings change a text, the two corpora differ. If the texts must match, "
        "set the same values."
    )
    assert result.returncode == 2
    assert "`earlier` holds no finished run" in result.stderr, "the corpus is then checked as before"
