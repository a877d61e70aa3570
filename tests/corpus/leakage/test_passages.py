"""Passages that a document shares with a test set, their places, and the text that is left without them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.corpus.leakage import passages as passages_module
from crosscut.corpus.leakage.grams import Grams
from crosscut.corpus.leakage.passages import Shared, passages, pieces, search, spans_to_cut
from crosscut.corpus.words.ngrams import words
from tests.corpus.leakage.test_grams import make

SECRET = "the moon was made of green cheese and nobody knew"


@pytest.fixture
def grams(tmp_path: Path) -> Grams:
    return make(tmp_path, SECRET, "and nobody knew the way home", other=["green cheese and nobody else"])


def find(text: str, grams: Grams) -> Shared:
    return search([text], grams).documents[0]


def test_passages_are_found_as_they_were_written(grams: Grams) -> None:
    text = (
        "It is said: \u201cThe moon -- was made of GREEN\ncheese\u201d; so much is known. Nobody knew the way, though."
    )
    found = [
        (one.test_set, one.item, one.num_grams, text[slice(*one.span)]) for one in passages(find(text, grams), grams)
    ]
    assert found == [(0, 0, 5, "The moon -- was made of GREEN\ncheese"), (0, 1, 2, "Nobody knew the way")]


def test_a_passage_of_several_items_belongs_to_the_one_that_has_most_of_it(grams: Grams) -> None:
    text = "cheese and nobody knew the way home"
    assert [(one.test_set, one.item, one.num_grams) for one in passages(find(text, grams), grams)] == [
        (0, 1, 4 + 1), (1, 2, 1),
    ]  # fmt: skip


def test_words_decide_not_hashes(grams: Grams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grams, "look_up", lambda self, hashes: (np.arange(len(hashes)), np.zeros(len(hashes), int), 0))
    text = f"{grams.texts[0].as_py()} and some other words"
    assert find(text, grams).words.tolist() == [0]
    assert not len(find("too short", grams).words)


@pytest.mark.parametrize("size", [40, 64, 100])
def test_long_documents_are_searched_in_pieces_and_lose_nothing(
    grams: Grams, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    text = " ".join(f"filler number {number}. {SECRET}!" for number in range(20)) + " x" * 200
    whole = search([text, SECRET], grams)
    monkeypatch.setattr(passages_module, "SLICE_CHARACTERS", size)
    pieced = search([text, SECRET], grams)
    assert pieced.asked == whole.asked
    for ours, theirs in zip(pieced.documents, whole.documents, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.tolist() == other.tolist()
    assert [one.num_grams for one in passages(pieced.documents[0], grams) if one.test_set == 0] == [8] * 20


def test_text_without_blanks_is_searched_all_the_same(grams: Grams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages_module, "SLICE_CHARACTERS", 64)
    assert len(find(f"{'x' * 1000} {SECRET}", grams).words) == 8


def cut(text: str, grams: Grams, margin: int) -> list[str]:
    return pieces(text, spans_to_cut(text, find(text, grams), margin=margin))


def test_a_cut_takes_its_margin_from_blank_to_blank(grams: Grams) -> None:
    text = f"Long before that, everybody said ({SECRET}). Then came the astronauts."
    assert cut(text, grams, 0) == ["Long before that, everybody said", "Then came the astronauts."]
    assert cut(text, grams, 5) == ["Long before that, everybody", "came the astronauts."]
    assert cut(text, grams, 8) == ["Long before that,", "the astronauts."]
    assert cut(text, grams, 1000) == []


def test_cuts_that_touch_are_one(grams: Grams) -> None:
    text = f"before {SECRET} between {SECRET} after"
    shared = find(text, grams)
    assert len(spans_to_cut(text, shared, margin=0)) == 2
    assert spans_to_cut(text, shared, margin=5) == [(0, len(text))]


def test_an_edge_without_a_blank_near_stays_where_it_is(grams: Grams) -> None:
    text = f"{'x' * 300}-{SECRET}-{'y' * 300}"
    assert [len(piece) for piece in cut(text, grams, 10)] == [291, 291]


LETTERS = ("a b c a", "c c b")
LETTER_GRAMS = ("a b c", "b c a", "c c b")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Grams:
    return make(tmp_path_factory.mktemp("letters"), *LETTERS)


@settings(max_examples=60)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "\u0130x"]), st.sampled_from([" ", "\n", ", ", "--", "\u2019"])),
        max_size=40,
    ),
    margin=st.integers(0, 6),
)
def test_all_that_is_shared_is_found_and_none_of_it_is_left(
    parts: list[tuple[str, str]], margin: int, letters: Grams
) -> None:
    text = "".join(word + gap for word, gap in parts)
    listed, shared = words(text), find(text, letters)
    expected = [at for at in range(len(listed) - 2) if " ".join(listed[at : at + 3]) in LETTER_GRAMS]
    assert shared.words.tolist() == expected
    for piece in pieces(text, spans_to_cut(text, shared, margin=margin)):
        assert not len(find(piece, letters).words)
