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
uncurl_quotes = true
normalization = "NFC"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("corpus.toml").write_text(CORPUS)
    Path("earlier").mkdir()
    Path("earlier/config.toml").write_text('folder = "earlier"\n[[sources]]\nname = "web"\nfiles = ["web.jsonl"]\n')
    return tmp_path


def test_other_repairs_of_an_earlier_corpus_are_told(crosscut_here, folder: Path) -> None:
    result = crosscut_here("prepare", "corpus.toml")
    assert result.stderr.splitlines()[0] == (
        "crosscut: `earlier` in `duplicates.against` was cleaned with `cleaning.uncurl_quotes` false, "
        '`cleaning.normalization` "none", unlike this corpus. Where these settings change a text, the two corpora '
        "differ. If the texts must match, set the same values."
    )
    assert result.returncode == 2
    assert "`earlier` holds no finished run" in result.stderr, "the corpus is then checked as before"
