"""Sets of n-grams: each n-gram once, for the documents that are compared, of all parts and runs."""

import random
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crosscut.corpus.collection import collect
from crosscut.corpus.documents import READ, read_table, write_table
from crosscut.corpus.duplicates import sketches
from crosscut.corpus.duplicates.candidates import CANDIDATES, MEMBERS, MEMBERS_SUFFIX
from crosscut.corpus.duplicates.gram_sets import NGRAMS, as_sets, read_sets, sets_name, write_sets
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.finished import mark_finished
from crosscut.corpus.words.ngrams import Hashed, hash_words, ngrams
from tests.corpus.duplicates.corpora import ingest, made_texts


@given(st.lists(st.lists(st.integers(0, 6), max_size=12), max_size=8))
def test_a_set_has_each_gram_once_in_order(documents):
    sizes = [0, *map(len, documents)]
    grams = Hashed(np.array([*chain.from_iterable(documents)], np.uint64), np.cumsum(sizes))
    before = grams.hashes.copy()
    sets = as_sets(grams)
    found = [sets.of(place).tolist() for place in range(len(documents))]
    assert found == [sorted(set(document)) for document in documents]
    assert np.array_equal(grams.hashes, before)


def test_sets_of_the_compared_documents_are_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sketches, "BATCH_CHARACTERS", 300)
    texts = made_texts(random.Random(0), families=12, copies=2)
    mark_finished(ingest(tmp_path / "old" / "work", [texts[:6]]), READ)
    work = ingest(tmp_path / "work", [texts[6:9], texts[9:]])  # its parts have the same names
    collection = collect(work, (str(tmp_path / "old"),), READ)
    numbers = np.array([1, 4, 1 << 32, (2 << 32) + 1, (2 << 32) + 2], np.uint64)
    for stage in (CANDIDATES, NGRAMS):
        (work / stage).mkdir()
    for name, some in (("00000", numbers[[0, 1, 3]]), ("00001", numbers[[1, 2, 3, 4]])):
        write_table(work / CANDIDATES / f"{name}{MEMBERS_SUFFIX}", {"number": some}, MEMBERS)
    counts = [write_sets(collection, work, 3, index, Output(work / NGRAMS)) for index in range(3)]
    assert [count["documents"] for count in counts] == [2, 1, 2]
    expected = [set(ngrams(hash_words([texts[at]]), 3).hashes.tolist()) for at in (1, 4, 6, 10, 11)]
    read = read_sets(work, numbers)
    assert [read.sets.of(place).tolist() for place in range(5)] == [sorted(some) for some in expected]
    hashes, sizes = read.at(np.array([4, 0]))
    assert hashes.tolist() == sorted(expected[4]) + sorted(expected[0])
    assert sizes.tolist() == [len(expected[4]), len(expected[0])]
    assert read_sets(work, numbers[2:3]).sets.hashes.tolist() == sorted(expected[2])


def test_a_part_without_compared_documents_has_an_empty_file(tmp_path):
    work = ingest(tmp_path, [["one two three"]])
    for stage in (CANDIDATES, NGRAMS):
        (work / stage).mkdir()
    collection = collect(work, (), READ)
    assert write_sets(collection, work, 3, 0, Output(work / NGRAMS)) == {"documents": 0, "ngrams": 0}
    assert read_table(work / NGRAMS / f"{sets_name(0)}.arrow").num_rows == 0
