"""Hashes made from characters stand for words: as many, equal where words are, wherever a text is cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.corpus.words import hashes as word_hashes
from crosscut.corpus.words.hashes import fold_words
from crosscut.corpus.words.ngrams import words


@given(st.lists(st.text(max_size=60), max_size=6))
def test_there_is_a_hash_for_each_word_and_another_for_another_word(texts):
    hashes, counts = fold_words(texts)
    assert counts.tolist() == [len(words(text)) for text in texts]
    said = [word for text in texts for word in words(text)]
    meaning = dict(zip(hashes.tolist(), said, strict=True))
    assert [meaning[value] for value in hashes.tolist()] == said
    assert len(meaning) == len(set(said))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_where_texts_are_cut_does_not_show(monkeypatch, size):
    texts = [
        "One, two; three four\nfive six_seven",
        "\u00c9tudes de \u039f\u03b4\u03cc\u03c2 \u4e2d\u6587",
        "",
        "x" * 300,
    ]
    expected = fold_words(texts)
    monkeypatch.setattr(word_hashes, "BLOCK_CHARACTERS", size)
    for mine, theirs in zip(fold_words(texts), expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_long_text_is_hashed_in_pieces(monkeypatch):
    sizes = []
    inner = word_hashes._hash_block

    def watched(text):
        sizes.append(len(text))
        return inner(text)

    monkeypatch.setattr(word_hashes, "_hash_block", watched)
    hashes, counts = fold_words(["a long line of words\n" * 20_000])
    assert counts.tolist() == [100_000]
    assert len(set(hashes.tolist())) == 5
    assert max(sizes) <= 2 * word_hashes.BLOCK_CHARACTERS
