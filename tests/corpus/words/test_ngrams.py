"""Words and their n-grams: the same whatever the punctuation, the process, and the documents beside."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crosscut.corpus.words.ngrams import hash_words, ngrams, words

TEXTS = st.lists(st.text(alphabet="ab ,\n\u00e9\u4e2d-", max_size=40), max_size=8)


def test_words_are_runs_of_letters_and_digits_in_lower_case():
    assert words("It's GPT-2,\n\tof\u00a02019 \u2014 \u00c9tude_no. 3!") == [
        "it", "s", "gpt", "2", "of", "2019", "\u00e9tude", "no", "3",
    ]  # fmt: skip
    assert words(" .,;\n") == []


@given(TEXTS, st.integers(1, 6))
def test_grams_of_a_document_do_not_depend_on_its_neighbours(texts, n):
    together = ngrams(hash_words(texts), n)
    assert len(together.starts) == len(texts) + 1
    for number, text in enumerate(texts):
        alone = ngrams(hash_words([text]), n)
        assert np.array_equal(together.of(number), alone.hashes)


@given(TEXTS, st.integers(1, 6))
def test_grams_are_equal_where_their_words_are(texts, n):
    grams = ngrams(hash_words(texts), n)
    meaning: dict[int, tuple[str, ...]] = {}
    for number, text in enumerate(texts):
        said = words(text)
        spans = [tuple(said[i : i + n]) for i in range(len(said) - n + 1)] or ([tuple(said)] if said else [])
        assert len(spans) == len(grams.of(number))
        for gram, span in zip(grams.of(number).tolist(), spans, strict=True):
            assert meaning.setdefault(gram, span) == span
    assert len(set(meaning.values())) == len(meaning)


def test_hashes_are_the_same_in_every_process():
    code = "from crosscut.corpus.words.ngrams import hash_words; print(hash_words(['one two']).hashes.tolist())"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert there.stdout.strip() == str(hash_words(["one two"]).hashes.tolist())
