"""The published test sets: WikiText's two forms have the same n-grams, and a real passage copied by hand is found."""

from pathlib import Path

import numpy as np
import pytest

from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.leakage.grams import Grams, gather
from crosscut.corpus.leakage.passages import passages, pieces, search, spans_to_cut
from crosscut.corpus.leakage.test_sets import read_test_set
from crosscut.data import read_documents


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    return shared / "data"


@pytest.fixture(scope="module")
def gathered(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Grams, Counts]:
    names = ("wikitext-103/wiki.test.raw", "wikitext-103/wiki.test.tokens", "lambada/lambada_test.jsonl")
    folder = tmp_path_factory.mktemp("grams")
    counts = gather([str(data / name) for name in names], "text", 8, 1e-3, Output(folder))
    return Grams.open(folder, 8), counts


def test_wikitext_has_the_same_grams_in_both_forms_but_for_its_rare_words(gathered: tuple[Grams, Counts]) -> None:
    grams, counts = gathered
    places, items = grams.items_of(np.arange(len(grams)))
    raw, tokens, _ = (set(places[grams.set_of_item[items] == place].tolist()) for place in range(3))
    assert tokens < raw  # all of them; the raw form also has those with words that the other writes as <unk>
    assert 0.92 < len(tokens) / len(raw) < 0.93
    assert [table["items"] for table in counts["test_sets"].values()] == [60, 60, 5153]
    assert counts["too_short"] == 0


def test_articles_have_their_titles(data: Path) -> None:
    titles = [item.title for item in read_test_set(data / "wikitext-103" / "wiki.test.raw", text_key="")]
    assert len(titles) == 60
    assert {"Robert Boulter", "Ise @-@ class battleship", "Constant k filter", "The Hustler ( film )"} <= set(titles)


def test_a_passage_of_a_test_set_that_is_copied_by_hand_is_found_and_cut(
    data: Path, gathered: tuple[Grams, Counts]
) -> None:
    grams = gathered[0]
    copied = read_test_set(data / "lambada" / "lambada_test.jsonl", text_key="text")[99].text
    text = next(iter(read_documents(["builtin:state-of-the-union"]))).text
    place = text.index(". ") + 2
    planted = text[:place] + copied + " " + text[place:]
    (shared,) = search([planted], grams).documents
    (passage,) = passages(shared, grams)
    assert (grams.set_names[passage.test_set], int(grams.numbers[passage.item])) == ("lambada_test.jsonl", 100)
    assert planted[slice(*passage.span)] in copied
    assert passage.span[1] - passage.span[0] >= len(copied) - 2  # all but the marks around it
    for piece in pieces(planted, spans_to_cut(planted, shared, margin=0)):
        assert not len(search([piece], grams).documents[0].words)
