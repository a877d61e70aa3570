"""Similarity is exact, whatever is read at a time; large groups are worked through without all their pairs."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.corpus.collection import Collection
from crosscut.corpus.documents import Part, write_table
from crosscut.corpus.duplicates import similarity
from crosscut.corpus.duplicates.candidates import CANDIDATES, GROUPS, MEMBERS, MEMBERS_SUFFIX, CandidatePairs
from crosscut.corpus.duplicates.gram_sets import NGRAMS, write_sets
from crosscut.corpus.duplicates.planted import exact_jaccard
from crosscut.corpus.duplicates.similarity import (
    PairCheck,
    compare_group,
    histogram,
    measure,
    share_groups,
    similarities,
)
from crosscut.corpus.duplicates.sketches import SKETCHES, SketchSettings, write_sketches
from crosscut.corpus.execution.stages import Output
from tests.corpus.duplicates.corpora import VOCABULARY, collection_of, made_texts
from tests.memory import at_most

SETTINGS = SketchSettings(3, 16, 4)
SETS = st.sets(st.integers(0, 40), min_size=1, max_size=20)


@settings(max_examples=50)
@given(SETS, st.lists(SETS, min_size=1, max_size=5))
def test_similarity_is_that_of_the_sets(one, others):
    arrays = [np.array(sorted(some), np.uint64) for some in (one, *others)]
    expected = [len(one & other) / len(one | other) for other in others]
    sizes = np.array(list(map(len, others)))
    assert similarities(arrays[0], np.concatenate(arrays[1:]), sizes).tolist() == expected


def compared(work, texts) -> Collection:
    """A collection of one part whose documents have sketches and sets of n-grams."""
    collection = collection_of(work, texts)
    for stage in (SKETCHES, CANDIDATES, NGRAMS):
        (work / stage).mkdir()
    write_sketches(collection.parts[0], SETTINGS, Output(work / SKETCHES))
    write_table(work / CANDIDATES / f"x{MEMBERS_SUFFIX}", {"number": range(len(texts))}, MEMBERS)
    write_sets(collection, work, SETTINGS.ngram, 0, Output(work / NGRAMS))
    return collection


@pytest.mark.parametrize("at_a_time", [1, 500, 10**9])
def test_measured_pairs_have_the_similarity_of_their_texts(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr(similarity, "CHARACTERS_AT_A_TIME", at_a_time)
    texts = made_texts(random.Random(0), families=4, copies=3)
    left, right = np.triu_indices(len(texts), 1)
    collection = compared(tmp_path, texts)
    monkeypatch.setattr(Part, "texts", None)  # no text is read again
    edges = measure(collection, tmp_path, CandidatePairs(left.astype(np.uint64), right.astype(np.uint64)))
    expected = [exact_jaccard(texts[one], texts[other], 3) for one, other in zip(left, right, strict=True)]
    assert edges.jaccard.tolist() == expected
    assert max(expected) > 0.5


@pytest.mark.parametrize("at_a_time", [5000, 10**9])
def test_of_every_similar_pair_in_a_group_one_is_a_duplicate_of_a_preferred_document(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr(similarity, "CHARACTERS_AT_A_TIME", at_a_time)
    chance = random.Random(1)
    base = [chance.choices(VOCABULARY, k=60) for _ in range(3)]
    texts = []
    for number in range(90):
        words = list(base[number % 3])
        words[chance.randrange(60)] = chance.choice(VOCABULARY)
        texts.append(" ".join(words))
    members = np.array(chance.sample(range(90), 90), np.uint64)
    known: dict[int, similarity.Edges] = {}
    collection = compared(tmp_path, texts)
    edges = list(compare_group(collection, PairCheck(3, 0.7, 30), tmp_path, members, known))
    found = {(int(one), int(other)) for some in edges for one, other, how in zip(*some, strict=True) if how >= 0.7}
    rank = {int(number): place for place, number in enumerate(members)}
    assert all(rank[one] < rank[other] for one, other in found)
    goes = {other for _, other in found}
    similar = [
        (one, other) for one in range(90) for other in range(one) if exact_jaccard(texts[one], texts[other], 3) >= 0.7
    ]
    assert len(similar) > 1000
    assert all(one in goes or other in goes for one, other in similar)
    assert sum(len(some.left) for some in edges) < 3 * 90
    again = list(compare_group(collection, PairCheck(3, 0.7, 30), tmp_path, members, known))
    assert sum(len(some.left) for some in again) == 0  # each leader's similarities are known from the first time


def test_memory_holds_some_sets_at_a_time(tmp_path, monkeypatch):
    chance = random.Random(3)
    words = chance.choices(VOCABULARY, k=2000)
    texts = [" ".join([*words, f"page{number}"]) for number in range(200)]  # about 16 kB of n-grams each
    collection = compared(tmp_path, texts)
    monkeypatch.setattr(similarity, "CHARACTERS_AT_A_TIME", 20 * len(texts[0]))
    members = np.arange(200, dtype=np.uint64)
    with at_most(3_000_000):  # all sets together take 3.2 MB, and comparing needs as much again several times
        (edges,) = compare_group(collection, PairCheck(3, 0.7, 30), tmp_path, members, {})
        assert len(edges.left) == 199
        measured = measure(collection, tmp_path, CandidatePairs(members[:-1], members[1:]))
    assert edges.jaccard.min() > 0.9
    assert measured.jaccard.tolist() == [exact_jaccard(*texts[at : at + 2], 3) for at in range(199)]


def test_each_group_falls_to_one_task_and_those_of_a_leader_to_the_same(tmp_path):
    chance = random.Random(2)
    files = [tmp_path / str(number) for number in range(3)]
    groups = [[[chance.randrange(9), *range(100, 100 + chance.randrange(33, 50))] for _ in range(20)] for _ in files]
    for path, some in zip(files, [*groups[:2], []], strict=True):
        write_table(path, {"members": some}, GROUPS)
    tasks = share_groups(files, 400)
    assert len(tasks) == -(-sum(len(one) for some in groups[:2] for one in some) // 400)
    assert sorted((path, row) for task in tasks for path, rows in task for row in rows) == [
        (path, row) for path in files[:2] for row in range(20)
    ]
    leaders = [{groups[files.index(path)][row][0] for path, rows in task for row in rows} for task in tasks]
    assert sum(map(len, leaders)) == len(set().union(*leaders))
    assert share_groups([files[2]], 400) == []


def test_histogram_counts_by_twentieths():
    assert histogram(np.array([0.7, 0.749, 0.75, 1.0, 0.3])) == {"0.30": 1, "0.70": 2, "0.75": 1, "0.95": 1}
