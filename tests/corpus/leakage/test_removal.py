"""Removal of passages that documents share with a test set, and the facts about it in the audit and the report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import DataError
from crosscut.config.corpora import LeakageConfig
from crosscut.corpus.documents import Lineage, Part, read_drops, read_table
from crosscut.corpus.leakage.removal import MATCHES_SUFFIX, read_cuts
from crosscut.corpus.leakage.stages import leakage_stages
from crosscut.data import read_documents
from tests.corpus.ingested import run, write_part

NAME = "000000-0000"
QUESTION = "Which of the nine lighthouses on the northern coast was built by an order of monks in the year 1483?"
TITLE_PAGE = "This ebook is for the use of anyone anywhere at no cost"


@pytest.fixture(scope="module")
def speeches() -> list[str]:
    """Real texts of some thousand words."""
    return [
        document.text for document, _ in zip(read_documents(["builtin:state-of-the-union"]), range(6), strict=False)
    ]


@pytest.fixture
def config(tmp_path: Path) -> LeakageConfig:
    lines = [QUESTION, "Too short a question?", f"{TITLE_PAGE}, says the first page of many."]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    article = "A lighthouse is a tower with a lamp that guides ships at night and in fog along the coast"
    wiki = f" \n = Lighthouse ( tower ) = \n \n {article} . \n Its keeper was often a monk <unk> of the order . \n"
    (tmp_path / "wiki.test.tokens").write_text(wiki, encoding="utf-8")
    return LeakageConfig(test_sets=(str(path), str(tmp_path / "wiki.test.tokens")))


def leak(work: Path, config: LeakageConfig, texts: list[str], **options: Any) -> dict[str, Any]:
    write_part(work, texts, **options)
    return {
        name: result.counts for name, result in run(work, leakage_stages(config, work, Lineage(cleaned=True))).items()
    }


def planted(text: str, passage: str, *, at: int) -> str:
    """A text with a passage copied into it."""
    place = text.index(" ", at)
    return f"{text[:place]} {passage}{text[place:]}"


def test_a_passage_copied_by_hand_is_found_and_cut(tmp_path: Path, config: LeakageConfig, speeches: list[str]) -> None:
    copied = "which of the nine LIGHTHOUSES, on the northern coast,\nwas built by an order of monks in the year 1483"
    texts = [*speeches[:3], planted(speeches[3], copied, at=2000), *speeches[4:]]
    counts = leak(tmp_path / "work", config, texts)
    cuts = read_cuts(Part(tmp_path / "work", NAME, Lineage(("leakage",))))
    assert list(cuts) == [3]
    ((start, end),) = cuts[3]
    assert copied in texts[3][start:end]
    assert len(copied) + 400 <= end - start <= len(copied) + 430  # the margin, moved outward to blanks
    assert texts[3][start - 1 : start + 1].split() and texts[3][end] == " "
    (match,) = read_table(tmp_path / "work" / "leakage" / f"{NAME}{MATCHES_SUFFIX}").to_pylist()
    assert match == {
        "row": 3, "id": "made/texts.jsonl#4", "test_set": "questions.jsonl", "item": 1, "grams": 13,
        "start": texts[3].index(copied), "end": texts[3].index(copied) + len(copied), "passage": copied,
    }  # fmt: skip
    assert counts["leakage"]["cut"] == {"documents": 1, "places": 1, "bytes": counts["leakage"]["cut"]["bytes"]}
    assert counts["leakage"]["bytes_in"] - counts["leakage"]["bytes_out"] == counts["leakage"]["cut"]["bytes"]
    assert end - start <= counts["leakage"]["cut"]["bytes"] <= end - start + 2  # and the blanks around it
    assert (counts["leakage"]["documents_in"], counts["leakage"]["documents_out"]) == (6, 6)


def test_overlap_tells_what_share_was_found_and_with_which_passages(tmp_path, config, speeches):
    half = "it is said the nine lighthouses on the northern coast was built by an order of monks"
    texts = [planted(speech, f"{TITLE_PAGE}.", at=100) for speech in speeches]
    work = tmp_path / "work"
    write_part(work, texts[:3], name="000000-0000")
    counts = leak(work, config, [*texts[3:], half], name="000001-0000")["overlap"]
    assert counts["test_sets"]["questions.jsonl"] == {
        "items": 3, "items_too_short": 1, "items_touched": 2, "items_half_found": 1,
        "grams": 13 + 11, "grams_found": 7 + 5, "grams_left": 0, "documents_touched": 7, "passages": 7,
        "longest": counts["test_sets"]["questions.jsonl"]["longest"],
    }  # fmt: skip
    assert counts["test_sets"]["questions.jsonl"]["longest"][0] == {
        "grams": 7, "document": "made/texts.jsonl#4", "item": 1, "passage": half.removeprefix("it is said "),
    }  # fmt: skip
    assert counts["test_sets"]["wiki.test.tokens"]["grams_found"] == 0
    assert counts["test_sets"]["wiki.test.tokens"]["longest"] == []
    assert [(one["documents"], one["test_sets"]) for one in counts["frequent"][:6]] == [
        *[(6, ["questions.jsonl"])] * 5, (1, ["questions.jsonl"]),
    ]  # fmt: skip
    assert "this ebook is for the use of anyone" in {one["gram"] for one in counts["frequent"][:5]}


def test_documents_are_dropped_where_that_is_asked_for(tmp_path, config, speeches):
    texts = [speeches[0], planted(speeches[1], QUESTION, at=500)]
    counts = leak(tmp_path / "work", replace(config, action="document"), texts)["leakage"]
    assert read_drops(tmp_path / "work", "leakage", NAME).to_pylist() == [
        {"row": 1, "rule": "leakage", "detail": "13 8-grams", "other": "questions.jsonl"}
    ]
    assert counts["rules"] == {"leakage": {"documents": 1, "bytes": len(texts[1].encode())}}
    assert counts["cut"] == {"documents": 0, "places": 0, "bytes": 0}


def test_a_report_changes_nothing(tmp_path, config, speeches):
    texts = [planted(speeches[1], QUESTION, at=500), "any text"]
    counts = leak(tmp_path / "work", replace(config, action="report"), texts, titles=["", "Lighthouse (tower)"])
    assert counts["leakage"]["documents_out"] == 2
    assert counts["leakage"]["bytes_out"] == counts["leakage"]["bytes_in"]
    assert read_cuts(Part(tmp_path / "work", NAME, Lineage(("leakage",)))) == {}
    assert counts["overlap"]["test_sets"]["questions.jsonl"]["grams_found"] == 13


def test_a_document_with_too_many_cuts_is_dropped(tmp_path, config, speeches):
    text = speeches[0]
    for place in (4500, 2500, 500):
        text = planted(text, QUESTION, at=place)
    leak(tmp_path / "work", replace(config, max_cuts=2), [text])
    assert read_drops(tmp_path / "work", "leakage", NAME).to_pylist() == [
        {"row": 0, "rule": "leakage", "detail": "13 8-grams in 3 places", "other": "questions.jsonl"}
    ]
    assert read_cuts(Part(tmp_path / "work", NAME, Lineage(("leakage",)))) == {}


def test_fewer_matches_than_asked_for_change_nothing(tmp_path, config, speeches):
    texts = [planted(speeches[0], QUESTION, at=500), planted(speeches[1], f"{TITLE_PAGE}.", at=500)]
    leak(tmp_path / "work", replace(config, min_matches=13), texts)
    assert list(read_cuts(Part(tmp_path / "work", NAME, Lineage(("leakage",))))) == [0]


def test_articles_of_a_test_set_go_by_title_or_by_their_words(tmp_path, config, speeches):
    article = (
        "A lighthouse is a tower, with a lamp that guides ships at night and in fog along the coast. Else all is new."
    )
    texts = ["Rewritten from scratch.", article, speeches[0], "A lighthouse is a tower with a lamp that is old."]
    leak(tmp_path / "work", config, texts, titles=["Lighthouse (tower)", "", "Lighthouse", ""])
    assert read_drops(tmp_path / "work", "leakage", NAME).to_pylist() == [
        {"row": 0, "rule": "test article", "detail": "Lighthouse ( tower ): by its title", "other": "wiki.test.tokens"},
        {
            "row": 1, "rule": "test article", "detail": "Lighthouse ( tower ): 60% of its n-grams",
            "other": "wiki.test.tokens",
        },
    ]  # fmt: skip
    assert list(read_cuts(Part(tmp_path / "work", NAME, Lineage(("leakage",))))) == [3]


def test_stages_depend_on_what_the_test_sets_hold_and_on_what_is_asked_for(tmp_path, config, speeches):
    work = tmp_path / "work"
    write_part(work, speeches)

    def ran(config: LeakageConfig) -> list[str]:
        results = run(work, leakage_stages(config, work, Lineage(cleaned=True)))
        return [name for name, result in results.items() if result.num_run]

    assert ran(config) == ["test-sets", "leakage", "overlap"]
    assert ran(config) == []
    assert ran(replace(config, margin=100)) == ["leakage"]
    assert ran(replace(config, margin=100, ngram=7)) == ["test-sets", "leakage", "overlap"]
    with Path(config.test_sets[0]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": " ".join(speeches[2].split()[200:220])}) + "\n")
    assert ran(replace(config, margin=100, ngram=7)) == ["test-sets", "leakage", "overlap"]
    assert list(read_cuts(Part(work, NAME, Lineage(("leakage",))))) == [2]


def test_no_test_sets_no_stages(tmp_path):
    assert leakage_stages(LeakageConfig(), tmp_path, Lineage(cleaned=True)) == ()


def test_missing_test_set_is_named(tmp_path, config):
    missing = str(tmp_path / "no.jsonl")
    with pytest.raises(DataError, match=r"no\.jsonl` must be a readable file"):
        leakage_stages(replace(config, test_sets=(missing,)), tmp_path, Lineage(cleaned=True))
