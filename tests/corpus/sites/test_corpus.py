"""A folder with the pages of two books and a blog: each book's notice goes, and the report and `--explain` show it."""

import random
from pathlib import Path

import pytest

from crosscut.config.corpora import HtmlConfig, LengthConfig
from crosscut.corpus import CorpusResult, explain_document, prepare_corpus
from crosscut.corpus.documents import CLEANING, INGEST, read_table
from tests.corpus.ingested import small_corpus, source

NOTICES = {
    "first": "Keyboard shortcuts: press left or right to navigate between chapters",
    "second": "You are reading the archived edition of this book",
}
WORDS = ["river", "stone", "window", "letter", "garden", "winter", "mountain", "silver", "music", "candle"]


def write_site(folder: Path, name: str, number: int, notice: str) -> None:
    draw = random.Random(name)
    for place in range(number):
        text = " ".join(draw.choices(WORDS, k=80)).capitalize()
        path = folder / name / f"chapter-{place:02}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        first = f"<p>{notice}</p>" if notice else ""
        path.write_text(f"<html><body><h1>Chapter {place}</h1>{first}<p>{text}.</p></body></html>", encoding="utf-8")


def prepare(folder: Path, **html: bool) -> CorpusResult:
    sources = (source("web", folder / "pages", format="html"), source("notes", folder / "notes.txt"))
    sections = {"length": LengthConfig(min_tokens=0), "html": HtmlConfig(**html)}
    return prepare_corpus(small_corpus(folder / "out", *sources, **sections), progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sites")
    for name, notice in NOTICES.items():
        write_site(folder / "pages" / "books", name, 12, notice)
    write_site(folder / "pages", "blog", 30, "")
    (folder / "notes.txt").write_text(" ".join(WORDS * 30))
    return folder


def texts(folder: Path, stage: str) -> list[str]:
    files = sorted(path for path in (folder / "out" / "work" / stage).glob("*.arrow") if ".drops" not in path.name)
    return [text for path in files for text in read_table(path)["text"].to_pylist()]


def test_each_book_loses_its_notice(folder: Path) -> None:
    result = prepare(folder)
    read, cleaned = texts(folder, INGEST), texts(folder, CLEANING)
    assert sum(notice in text for text in read for notice in NOTICES.values()) == 24
    assert not any(notice in text for text in cleaned for notice in NOTICES.values())
    expected = list(read)
    for notice in NOTICES.values():
        expected = [text.replace(f"{notice}\n\n", "") for text in expected]
    assert cleaned == expected, "nothing else has changed"
    (entry,) = (stage for stage in result.report["flow"] if stage["stage"] == CLEANING)
    assert entry["changed"] == {"site boilerplate": 24, "unicode": 0, "join_lines": 0}
    assert entry["mended"] == -12 * sum(len(notice) + 2 for notice in NOTICES.values())
    assert "Keyboard shortcuts" in explain_document(result.config, "web/books/first/chapter-03.html#1")
    assert sum(stage.num_run for stage in prepare(folder).stages) == 0, "nothing is done twice"


def test_one_of_many_versions_of_a_text_stays_whole(tmp_path: Path) -> None:
    draw = random.Random(1)
    (tmp_path / "notes.txt").write_text(" ".join(WORDS * 30))
    lines = [" ".join(draw.choices(WORDS, k=9)) for _ in range(60)]
    for year in range(12):
        path = tmp_path / "pages" / "act" / f"{year}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<html><body><h1>Version of {1990 + year}</h1><p>{'<p>'.join(lines)}</body></html>")
    result = prepare(tmp_path)
    assert result.report["summary"]["kept"]["documents"] == 1 + 1
    assert texts(tmp_path, CLEANING) == texts(tmp_path, INGEST)


@pytest.mark.slow  # prepares two corpora
def test_parts_without_pages_are_not_cleaned_again(tmp_path: Path) -> None:
    write_site(tmp_path / "pages", "book", 20, NOTICES["first"])
    (tmp_path / "notes.txt").write_text(" ".join(WORDS * 30))
    prepare(tmp_path)
    write_site(tmp_path / "pages", "book", 21, NOTICES["second"])
    run = {stage.name: stage.num_run for stage in prepare(tmp_path).stages}
    assert run["site-lines"] == run["cleaning"] == 1


@pytest.mark.slow  # the opposite of test_each_book_loses_its_notice
def test_a_setting_leaves_the_notices_where_they_are(folder: Path) -> None:
    result = prepare(folder, site_boilerplate=False)
    assert texts(folder, CLEANING) == texts(folder, INGEST)
    assert not {"site-lines", "site-boilerplate"} & {stage.name for stage in result.stages}
