"""Sketches: the least of each permutation, whatever is worked on beside; as many equal values as n-grams in common."""

import random

import numpy as np
import pytest

from crosscut.corpus.collection import first_number
from crosscut.corpus.duplicates import sketches
from crosscut.corpus.duplicates.planted import exact_jaccard, plant
from crosscut.corpus.duplicates.sketches import (
    SKETCHES,
    SketchSettings,
    minhash,
    read_band,
    read_lengths,
    read_settings,
    read_sketches,
    write_sketches,
)
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.words.ngrams import hash_words, ngrams
from tests.corpus.duplicates.corpora import VOCABULARY, collection_of

SETTINGS = SketchSettings(ngram=3, bands=4, rows=5)


def values_of(texts, settings=SETTINGS):
    return minhash(ngrams(hash_words(texts), settings.ngram), settings)


def test_each_value_is_the_least_of_a_permutation():
    texts = ["a b c d e f", "one two", "", "x y z x y z x y z"]
    grams = ngrams(hash_words(texts), 3)
    factors = sketches._factors(SETTINGS).tolist()
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == 20
    expected = [
        [min((gram >> 32) * factor % 2**32 for gram in grams.of(place).tolist()) for factor in factors]
        for place in (0, 1, 3)
    ]
    assert values_of(texts).tolist() == expected


def test_blocks_do_not_show(monkeypatch):
    chance = random.Random(0)
    texts = [" ".join(chance.choices(VOCABULARY, k=chance.randint(0, 50))) for _ in range(60)]
    expected = values_of(texts)
    for size in (1, 100):
        monkeypatch.setattr(sketches, "_BLOCK_GRAMS", size)
        assert np.array_equal(values_of(texts), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("jaccard", [0.7, 0.5, 0.9])
def test_equal_values_are_the_similarity(jaccard):
    chance = random.Random(1)
    settings = SketchSettings(5, 32, 8)
    errors = []
    for _ in range(40):
        text = " ".join(chance.choices(VOCABULARY, k=500))
        copy = plant(text, jaccard, 5, [" ".join(VOCABULARY)], chance)
        one, other = values_of([text, copy.text], settings)
        assert copy.jaccard == exact_jaccard(text, copy.text, 5)
        errors.append((one == other).mean() - copy.jaccard)
    deviation = (jaccard * (1 - jaccard) / 256) ** 0.5
    assert abs(np.mean(errors)) < 4 * deviation / 40**0.5
    assert 0.7 * deviation < np.std(errors) < 1.3 * deviation


def test_what_is_written_is_read_by_band_and_by_document(tmp_path, monkeypatch):
    monkeypatch.setattr(sketches, "BATCH_CHARACTERS", 8)
    texts = ["one two three four", "...", "five six seven", ""]
    collection = collection_of(tmp_path, texts)
    (tmp_path / SKETCHES).mkdir()
    assert write_sketches(collection.parts[0], SETTINGS, Output(tmp_path / SKETCHES)) == {"sketches": 2}
    assert read_settings(tmp_path / SKETCHES / "000000-0000.arrow") == SETTINGS
    expected = values_of(texts)
    numbers = np.array([0, 2], np.uint64)
    whole = read_sketches(collection, numbers)
    assert np.array_equal(whole.values, expected)
    assert whole.lengths.tolist() == read_lengths(collection, numbers).tolist() == [18, 14]
    for band in range(4):
        read = read_band(collection, 0, band)
        assert read.numbers.tolist() == [0, 2]
        assert np.array_equal(read.values, expected[:, 5 * band : 5 * band + 5])
    assert read_lengths(collection, np.empty(0, np.uint64)).tolist() == []
    assert first_number(0) == 0
