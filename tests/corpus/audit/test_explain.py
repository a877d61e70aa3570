"""The story of one document, whatever became of it."""

import re
from pathlib import Path

import pytest

from crosscut.config.errors import DataError
from crosscut.corpus.audit.explain import explain
from tests.corpus.audit.conftest import FILTERS, FOREIGN, HOSTILE, LEAKED, Audited, run, texts

MIDDLE = len(texts()) // 2


def id_of(number: int) -> str:
    return f"{'speeches' if number < MIDDLE else 'web'}/some.jsonl#{number}"


def number_of(beginning: str) -> int:
    return next(number for number, text in enumerate(texts()) if text.startswith(beginning))


def told(audited: Audited, number: int) -> dict[str, str]:
    """The story by its labels."""
    first, blank, *lines = explain(audited.work, FILTERS, id_of(number)).split("\n")
    assert (first, blank) == (id_of(number), "")
    story: dict[str, str] = {}
    label = ""
    for line in lines:
        label = line[:16].strip() or label
        story[label] = f"{story.get(label, '')}{line[16:]}\n"
    return story


def test_a_document_that_stays_passes_every_stage(audited):
    story = told(audited, 12)
    assert list(story) == ["read", *FILTERS, "kept"]
    assert re.match(r"1,500 characters; part 000000-0000, row 12\n\| ", story["read"])
    assert story["language"] == "language en, score 0.871\n"
    assert story["length"] == f"tokens {len(texts()[12].split())}\n"
    assert story["near"] == "stays\n"


def test_a_document_that_goes_says_why_and_no_more(audited):
    story = told(audited, number_of(FOREIGN))
    assert list(story) == ["read", "urls", "cleaning", "language"]
    assert story["language"].startswith("goes: language, es 0.95\n")
    assert told(audited, 30)["urls"] == "goes: domain, bad.example\n"
    assert told(audited, number_of(HOSTILE))["length"].startswith("goes: too short, 9 tokens\n")


def test_a_duplicate_is_told_beside_what_it_is_like(audited):
    copy = len(texts()) - 14
    assert texts()[copy].endswith("Copied once more.")
    story = told(audited, copy)["near"]
    assert re.match(rf"goes: near-duplicate, Jaccard 0\.\d\d\nmatched with {id_of(3)}\nthis   \| ", story)
    assert "THAT" in story
    assert "other  | " in story
    assert told(audited, 3)["stands for"] == f"2 that went at near:\n{id_of(copy - 9)}\n{id_of(copy)}\n"


def test_a_repair_is_shown_where_it_begins(audited):
    story = told(audited, number_of("It\u00e2"))["cleaning"]
    assert "before | It\u00e2\u20ac\u2122s said" in story
    assert "after  | It's said" in story


def test_leaks_and_cuts_are_shown(audited):
    number = len(texts()) - 1
    at = texts()[number].index(LEAKED)
    assert told(audited, number)["leakage"] == (
        "4 n-grams in a row stand also in made, item 3:\n"
        f"| {LEAKED}\n"
        f"cut out of it: characters {at:,} to {at + len(LEAKED):,}\n"
    )


def test_a_duplicate_of_an_earlier_run_is_found_there(audited, tmp_path):
    other = run(tmp_path / "other")
    (other.work / "ingest" / "000000-0000.arrow").unlink()
    first_copy = len(texts()) - 14 - 12
    story = explain(other.work, FILTERS, id_of(first_copy), against=(audited.config.folder,))
    assert f"matched with {id_of(0)} of the earlier run {Path(audited.config.folder)}" in story
    assert f"matched with {id_of(0)}\n" not in story


def test_a_record_that_could_not_be_read_is_explained(audited):
    story = explain(audited.work, FILTERS, "web/some.jsonl#999")
    assert "not read        data/some.jsonl, line 999: Expecting" in story


def test_an_unknown_id_is_refused_with_near_ones(audited):
    with pytest.raises(
        DataError, match=r"`--explain` must name a document of this corpus, .* but is `web/some.jsonl#998`\."
    ):
        explain(audited.work, FILTERS, "web/some.jsonl#998")
    with pytest.raises(DataError, match=rf"Near ones are `{id_of(len(texts()) - 1)}`, `{id_of(len(texts()) - 2)}`"):
        explain(audited.work, FILTERS, "web/some.jsonl#998")
    with pytest.raises(DataError, match=r"Near ones are `speeches/some.jsonl#1"):
        explain(audited.work, FILTERS, "speches/some.jsonl#1")
