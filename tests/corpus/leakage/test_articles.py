"""Removal of a test set's articles alone. What is left is counted again here, with plain sets of words.

The corpus has some articles of a test set, planted under their titles or without, as they are or as Wikipedia writes
them, and documents that only quote the test sets.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.config import DataError
from crosscut.config.corpora import LeakageConfig
from crosscut.corpus.documents import Lineage, read_drops
from crosscut.corpus.leakage.corpus_filter import FilterSize
from crosscut.corpus.leakage.overlap import PAPER_OVERLAPS
from crosscut.corpus.leakage.stages import leakage_stages
from crosscut.corpus.leakage.test_sets import read_test_set
from crosscut.corpus.words.ngrams import hash_words, ngrams
from crosscut.data import read_documents
from tests.corpus.ingested import run, write_part
from tests.refusals import refusal

QUOTED, CLOZE = 40, 100
"""Words of an article that another document quotes, and of a passage that is no article."""


def sets_of_words(texts: list[str]) -> set[tuple[str, ...]]:
    """The 8-grams of texts, counted with nothing but the standard library."""
    grams: set[tuple[str, ...]] = set()
    for text in texts:
        words = re.findall(r"[^\W_]+", text.lower())
        grams.update(zip(*(words[start:] for start in range(8)), strict=False))
    return grams


def natural(text: str) -> str:
    """Text of WikiText as Wikipedia has it."""
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    return re.sub(r" ([,.;:!?)])", r"\1", text).replace("( ", "(").replace(" n't", "n't")


def tokenised(text: str) -> str:
    """Text as WikiText has it."""
    return re.sub(r"([,.;])", r" \1", text).replace("-", " @-@ ")


@pytest.fixture(scope="module")
def speeches() -> list[str]:
    documents = (document.text for document in read_documents(["builtin:state-of-the-union"]))
    return [text for text, _ in zip(documents, range(16), strict=False)]


@pytest.fixture(scope="module")
def folder(speeches: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two test sets: three articles in WikiText's form, and a passage."""
    folder = tmp_path_factory.mktemp("sets")
    bodies = [" ".join(text.split()[:1500]) for text in speeches[:3]]
    articles = [f" \n = Speech @-@ {n} ( {n} ) = \n \n {tokenised(body)} \n" for n, body in enumerate(bodies)]
    (folder / "wiki.test.tokens").write_text("".join(articles), encoding="utf-8")
    passage = " ".join(speeches[3].split()[:CLOZE])
    (folder / "cloze.jsonl").write_text(json.dumps({"text": passage}) + "\n", encoding="utf-8")
    return folder


def planted(speeches: list[str], folder: Path) -> tuple[list[str], list[str], list[int]]:
    """Texts and titles of documents, and the rows that are articles of the test set."""
    own = [" ".join(text.split()[:1500]) for text in speeches]
    quote = " ".join(own[2].split()[200 : 200 + QUOTED])
    texts = [
        own[4],
        "Only the title is an article's.",  # by its title
        f"{own[5]} {quote} {own[6]}",  # quotes the third article
        f"Rewritten at its beginning. {own[0]}",  # by its words, as Wikipedia writes them
        f"{own[7]} {speeches[3][:400]}",  # quotes the passage
        tokenised(own[1]),  # by its words, as WikiText writes them
        own[8],
    ]
    return texts, ["", "Speech-1 (1)", "Speech", "Other", "", "", ""], [1, 3, 5]


def overlap_of(work: Path, texts: list[str], titles: list[str], config: LeakageConfig) -> dict[str, Any]:
    write_part(work, texts[:3], titles=titles[:3])
    write_part(work, texts[3:], titles=titles[3:], name="000001-0000")
    return {
        name: result.counts for name, result in run(work, leakage_stages(config, work, Lineage(cleaned=True))).items()
    }


def test_overlaps_of_what_is_left_are_those_of_an_independent_count(speeches, folder, tmp_path):
    files = {name: str(folder / name) for name in ("wiki.test.tokens", "cloze.jsonl")}
    texts, titles, articles = planted(speeches, folder)
    left = sets_of_words([text for row, text in enumerate(texts) if row not in articles])
    config = LeakageConfig(test_sets=tuple(files.values()), action="articles", false_positives=1e-9)
    counts = overlap_of(tmp_path / "work", texts, titles, config)
    for name, file in files.items():
        asked = sets_of_words([item.text for item in read_test_set(Path(file), text_key="text")])
        found = counts["overlap"]["test_sets"][name]
        assert found["grams"] == len(asked)
        assert found["grams_found"] == len(asked & sets_of_words(texts))
        assert found["grams_let_through"] == found["grams_left"] == len(asked & left)
        assert 0 < found["grams_left"] <= found["grams_found"]
    dropped = [
        row["detail"]
        for part in ("000000-0000", "000001-0000")
        for row in read_drops(tmp_path / "work", "leakage", part).to_pylist()
    ]
    assert [re.sub(r"\d+%", "%", detail) for detail in dropped] == [
        "Speech @-@ 1 ( 1 ): by its title",
        "Speech @-@ 0 ( 0 ): % of its n-grams",
        "Speech @-@ 1 ( 1 ): % of its n-grams",
    ]
    assert counts["leakage"]["cut"]["documents"] == 0, "nothing but whole articles is removed"


def test_test_sets_without_articles_are_refused(folder, tmp_path):
    cloze = str(folder / "cloze.jsonl")
    for action in ("report", "document", "passage"):
        assert leakage_stages(LeakageConfig(test_sets=(cloze,), action=action), tmp_path, Lineage())
    config = LeakageConfig(test_sets=(cloze,), action="articles")
    assert refusal(DataError, leakage_stages, config, tmp_path, Lineage()) == (
        '`leakage.test_sets` must name a test set with articles for `leakage.action` = "articles", such as '
        f"WikiText's, but names `{cloze}`, whose texts have no titles. Nothing would be removed. Set "
        'leakage.action="passage", or "report" to remove nothing.'
    )


def test_a_filter_alone_finds_more_at_the_rate_that_was_asked_for(speeches, folder, tmp_path):
    texts, titles, _ = planted(speeches, folder)
    config = LeakageConfig(test_sets=(str(folder / "wiki.test.tokens"),), action="articles", false_positives=0.1)
    found = overlap_of(tmp_path / "work", texts, titles, config)["overlap"]["test_sets"]["wiki.test.tokens"]
    rest = found["grams"] - found["grams_left"]
    assert 0.02 < (found["grams_let_through"] - found["grams_left"]) / rest < 0.12
    report = overlap_of(tmp_path / "all", texts, titles, LeakageConfig(**{**vars(config), "action": "report"}))
    assert report["overlap"]["test_sets"]["wiki.test.tokens"]["grams_left"] == found["grams_found"]


def test_kept_slots_answer_as_the_whole_filter_does(speeches, folder, tmp_path):
    texts = [*speeches[4:8], "Fewer than eight words have none"]
    config = LeakageConfig(test_sets=(str(folder / "wiki.test.tokens"),), action="report", false_positives=0.05)
    counts = overlap_of(tmp_path / "work", texts, [""] * 5, config)
    hashes = [ngrams(hash_words([text]), 8).hashes for text in texts[:4]]
    size = FilterSize(counts["leakage"]["grams_asked"], 0.05)
    whole = [set(size.slots(np.concatenate(hashes), row).tolist()) for row in range(size.num_rows)]
    items = [item.text for item in read_test_set(folder / "wiki.test.tokens", text_key="")]
    asked = np.unique(np.concatenate([ngrams(hash_words([text]), 8).hashes for text in items]))
    slots = [size.slots(asked, row).tolist() for row in range(size.num_rows)]
    through = sum(all(slot in row for slot, row in zip(one, whole, strict=True)) for one in zip(*slots, strict=True))
    assert counts["overlap"]["test_sets"]["wiki.test.tokens"]["grams_let_through"] == through
    assert counts["corpus-filter"]["grams"] == sum(map(len, hashes)) == counts["leakage"]["grams_asked"] - 1


@pytest.mark.slow  # the whole of both published test sets; the tests above find the same faults
def test_real_articles_are_removed_and_their_overlap_is_that_of_an_independent_count(shared, speeches, tmp_path):
    """Half of WikiText-103's test articles, planted as WikiText or as Wikipedia writes them."""
    file = shared / "data" / "wikitext-103" / "wiki.test.raw"
    cloze = shared / "data" / "lambada" / "lambada_test.jsonl"
    items = read_test_set(file, text_key="")
    bodies = [item.text.split("\n", 2)[2] for item in items]
    articles = [natural(body) if row % 4 else body for row, body in enumerate(bodies) if row % 2]
    halves = [body[: len(body) // 5] for body in bodies[::6]]  # a fifth of an article is no article
    texts = [*articles, *halves, *speeches]
    titles = [natural(items[1].title), *[""] * (len(texts) - 1)]
    config = LeakageConfig(test_sets=(str(file), str(cloze)), action="articles", false_positives=1e-3)
    counts = overlap_of(tmp_path / "work", texts, titles, config)
    assert counts["leakage"]["rules"]["test article"]["documents"] == len(articles) == 30
    left = sets_of_words([*halves, *speeches])
    shares = {}
    for name, of_set in (("wiki.test.raw", bodies), ("lambada_test.jsonl", None)):
        texts_of_set = of_set or [item.text for item in read_test_set(cloze, text_key="text")]
        titled = [f"{item.title}\n{body}" for item, body in zip(items, of_set, strict=True)] if of_set else texts_of_set
        asked = sets_of_words([text.replace(" n't", "n't") for text in titled])
        found = counts["overlap"]["test_sets"][name]
        assert (found["grams"], found["grams_left"]) == (len(asked), len(asked & left))
        rest = found["grams"] - found["grams_left"]
        assert 0 <= found["grams_let_through"] - found["grams_left"] < 0.0015 * rest
        shares[name] = found["grams_left"] / found["grams"]
    assert 0.02 < shares["wiki.test.raw"] < PAPER_OVERLAPS["WikiText-103"]
