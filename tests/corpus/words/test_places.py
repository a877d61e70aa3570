"""Places of words lead back to the text, whatever its letters."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.corpus.words.ngrams import words
from crosscut.corpus.words.places import WordPlaces


def test_span_of_words_is_what_was_written() -> None:
    text = "  She said: \u201cDon't go_there\u201d \u2014 twice, 1,000 times."
    places = WordPlaces(text)
    assert places.words(1, 4) == "said don t go"
    starts, ends = places.spans(np.array([1]), 4)
    assert text[starts[0] : ends[0]] == "said: \u201cDon't go"


@given(st.text(max_size=60))
def test_words_are_those_that_are_hashed(text: str) -> None:
    places = WordPlaces(text)
    assert [places.words(number, 1) for number in range(len(places))] == words(text)


@pytest.mark.parametrize("text", ["\u0130zmir \u0130\u0130 a\u0130b", "\u0391\u03a3'\u0391 \u0391\u03a3 \u03a3"])
def test_letters_whose_lower_case_is_longer_or_depends_on_others(text: str) -> None:
    places = WordPlaces(text)
    assert [places.words(number, 1) for number in range(len(places))] == words(text)
    starts, ends = places.spans(np.arange(len(places)), 1)
    assert (starts < ends).all()
    assert text[starts[0] : ends[-1]] == text


def test_one_letter_alone_is_longer_in_lower_case() -> None:
    longer = [character for character in map(chr, range(sys.maxunicode + 1)) if len(character.lower()) != 1]
    assert longer == ["\u0130"]
