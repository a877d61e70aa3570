"""Planted duplicates have the similarity they are said to have, and measure what the search finds."""

import random

import pytest

from crosscut.config.corpora import DuplicatesConfig
from crosscut.corpus.documents import READ, Part
from crosscut.corpus.duplicates import candidates, duplicate_stages, planted
from crosscut.corpus.duplicates.planted import exact_jaccard, find_similar, measure_planted, plant, spread_parts
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.parts import find_parts
from tests.corpus.duplicates.corpora import VOCABULARY, corpus_config, ingest
from tests.corpus.ingested import run


def texts(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(VOCABULARY, k=chance.randint(80, 200))) for _ in range(count)]


def test_similarity_is_that_of_the_sets_of_grams():
    assert exact_jaccard("a b c d", "A, b. C d!", 2) == 1
    assert exact_jaccard("a b c d", "a b c e", 2) == 2 / 4
    assert exact_jaccard("a", "a", 5) == 1
    assert exact_jaccard("", "...", 5) == 0


@pytest.mark.parametrize("wanted", [0.5, 0.75, 0.95])
def test_copies_come_close_to_the_similarity_that_is_wanted(wanted):
    chance = random.Random(0)
    copies = [plant(text, wanted, 5, texts(20, seed=1), chance) for text in texts(60)]
    assert abs(sum(copy.jaccard for copy in copies) / 60 - wanted) < 0.06
    assert all(exact_jaccard(text, copy.text, 5) == copy.jaccard for text, copy in zip(texts(60), copies, strict=True))


def test_a_text_of_one_word_can_be_planted():
    chance = random.Random(0)
    assert all(0 <= plant("word", 0.5, 1, ["other"], chance).jaccard <= 1 for _ in range(50))


def test_recall_and_precision_are_measured(tmp_path, monkeypatch):
    work = ingest(tmp_path / "work", [texts(150), texts(150, seed=1), ["short"]])
    stages = duplicate_stages(corpus_config(tmp_path), READ)
    results = run(work, stages)
    assert results["planted"].num_tasks == 1
    counts = results["planted"].counts
    assert counts["sample"] == 300
    assert sum(counts["planted"].values()) == 150
    assert all(counts["planted_found"][tenth] == 0 for tenth in ("0.5", "0.6"))
    high = {tenth: count for tenth, count in counts["planted"].items() if float(tenth) >= 0.7}
    assert sum(counts["planted_found"][tenth] for tenth in high) >= 0.97 * sum(high.values()) > 50
    assert counts["found"] == counts["right"] > 0
    parts = [part for part, _ in find_parts(work)]
    assert measure_planted(parts, DuplicatesConfig(), 1234, Output(tmp_path)) == counts
    assert measure_planted(parts, DuplicatesConfig(), 5, Output(tmp_path)) != counts

    # A search that returns too little, or what is not similar, shows.
    monkeypatch.setattr(planted, "find_similar", lambda texts, config: {(0, 1): 0.9})
    worse = measure_planted(parts, DuplicatesConfig(), 1234, Output(tmp_path))
    assert (worse["found"], worse["right"]) == (1, 0)
    assert set(worse["planted_found"].values()) == {0}


def test_a_corpus_without_documents_has_nothing_to_measure(tmp_path):
    counts = measure_planted([], DuplicatesConfig(), 0, Output(tmp_path))
    assert (counts["sample"], counts["planted"], counts["found"]) == (0, {}, 0)


def test_similar_texts_are_found_by_their_places():
    one, two, three = texts(3)
    found = find_similar([one, two, one + " more", "", three], DuplicatesConfig())
    assert list(found) == [(0, 2)]
    assert found[0, 2] == exact_jaccard(one, one + " more", 5)


def test_a_search_in_several_shares_finds_the_same(monkeypatch):
    some = texts(20)
    some += [text + " more" for text in some[:5]]
    found = find_similar(some, DuplicatesConfig())
    monkeypatch.setattr(candidates, "DOCUMENTS_PER_TASK", 60)
    assert len(candidates.shares(len(some), 20)) > 1
    assert find_similar(some, DuplicatesConfig()) == found
    assert len(found) == 5


def test_the_sample_is_taken_from_all_over_the_corpus(tmp_path):
    parts = [Part(tmp_path, str(number)) for number in range(100)]
    assert [len(spread_parts(parts[:count])) for count in (0, 1, 16, 100)] == [0, 1, 16, 16]
    assert {int(part.name) // 10 for part in spread_parts(parts)} == set(range(10))
