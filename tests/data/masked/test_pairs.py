"""Pairs of segments: every sentence once, in the order of the text, and cut at random."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from crosscut.config import DataError
from crosscut.data import Shard
from crosscut.data.masked.draws import key_of
from crosscut.data.masked.pairs import PairSampler, find_pairs
from crosscut.data.shards.writing import INDEX_DTYPE
from crosscut.data.tokenization.special_tokens import SpecialTokens
from tests.refusals import refusal

SPECIAL = SpecialTokens(begin=1, separator=2, mask=3, padding=0)
S = 24


def make_shard(documents: Sequence[Sequence[int]], *, first: int = 10) -> Shard:
    """Documents with sentences of the given lengths. The tokens count up from `first`; a separator ends a document."""
    tokens: list[int] = []
    ends, sentences = [], []
    for lengths in documents:
        for length in lengths:
            tokens += range(first + len(tokens), first + len(tokens) + length)
            sentences.append(len(tokens))
        tokens.append(SPECIAL.separator)
        ends.append(len(tokens))
    index = np.zeros(len(documents), dtype=INDEX_DTYPE)
    index["end"], index["record"] = ends, np.arange(len(documents)) + 1
    return Shard("train-0", np.array(tokens, np.uint16), index, ("a.jsonl",), np.array(sentences, np.uint64))


@pytest.fixture
def documents() -> list[list[int]]:
    random = np.random.default_rng(1)
    made = [random.integers(1, 12, count).tolist() for count in random.integers(1, 9, 200)]
    return [[], [5], *made, [30, 40], [9, 9, 9], []]


def pairs_of(shard: Shard, room: int) -> list[tuple[int, int, int]]:
    pairs = find_pairs(shard, room=room, key=key_of(3))
    return list(zip(pairs.begins.tolist(), pairs.firsts.tolist(), pairs.counts.tolist(), strict=True))


def test_every_sentence_is_in_one_pair_unless_it_is_alone(documents: list[list[int]]) -> None:
    found = pairs_of(make_shard(documents), S)
    sentences = [sentence for _, first, count in found for sentence in range(first, first + count)]
    expected, number = [], 0
    for lengths in documents:
        expected += range(number, number + len(lengths)) if len(lengths) > 1 else []
        number += len(lengths)
    assert sentences == expected


def test_pairs_have_two_sentences_of_one_document_and_fit(documents: list[list[int]]) -> None:
    shard = make_shard(documents)
    for begin, first, count in pairs_of(shard, S):
        end = int(shard.sentences[first + count - 1])
        assert count >= 2
        assert SPECIAL.separator not in shard.tokens[begin:end]
        assert begin in (0, *shard.ends.tolist(), *shard.sentences.tolist())
        is_last = end + 1 in shard.ends.tolist()
        assert end - begin <= S or count == 2 or (count == 3 and is_last)


def test_a_tenth_of_the_pairs_is_short() -> None:
    shard = make_shard([[1] * 50_000])
    counts = np.array([count for _, _, count in pairs_of(shard, 100)][:-1])
    short = counts < 100
    expected = 0.1 * 98 / 99  # a random length may also be the whole room
    assert abs(short.mean() - expected) < 3 * np.sqrt(expected * (1 - expected) / len(counts))
    lengths = counts[short]  # uniform from 2 to 99
    assert abs(lengths.mean() - 50.5) < 3 * np.sqrt((98**2 - 1) / 12 / len(lengths))


def rows_of(shards: Sequence[Shard], count: int | None = None, *, first: int = 0, length: int = S) -> np.ndarray:
    sampler = PairSampler(shards, sequence_length=length, seed=4, special=SPECIAL)
    return sampler.batch_at(first, count or sampler.samples_per_epoch)


def segments(row: np.ndarray) -> tuple[list[int], list[int]]:
    """Both segments of a row. Fails unless the row is `[CLS] A [SEP] B [SEP] [PAD] ...`."""
    begin, *rest = row[: (row != SPECIAL.padding).sum()].tolist()
    assert begin == SPECIAL.begin
    border = rest.index(SPECIAL.separator)
    a, b = rest[:border], rest[border + 1 : -1]
    assert rest[-1] == SPECIAL.separator
    assert a
    assert b
    assert not {*SPECIAL}.intersection(a + b)
    assert (row[len(rest) + 1 :] == SPECIAL.padding).all()
    return a, b


def test_rows_are_consecutive_segments_that_meet_at_a_sentence(documents: list[list[int]]) -> None:
    shard = make_shard(documents)
    rows = rows_of([shard])
    assert rows.shape == (len(rows), S)
    assert rows.dtype == np.int64
    borders = set(shard.sentences.tolist())
    for row in rows:
        a, b = segments(row)
        assert np.diff(a + b).tolist() == [1] * (len(a) + len(b) - 1)
        assert b[0] - 10 in borders


def test_an_epoch_has_every_pair_once_in_a_new_order(documents: list[list[int]]) -> None:
    shards = [make_shard(documents[:-3]), make_shard(documents[:-3], first=20_000)]
    sampler = PairSampler(shards, sequence_length=40, seed=4, special=SPECIAL)  # all pairs fit
    count = sampler.samples_per_epoch
    epochs = [
        [[*itertools.chain(*segments(row))] for row in sampler.batch_at(epoch * count, count)] for epoch in range(2)
    ]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len({tuple(pair) for pair in epochs[0]}) == count
    assert len({pair[0] >= 20_000 for pair in epochs[0][:20]}) == 1, "shards come one after the other"


@pytest.mark.parametrize(("lengths", "kept"), [((30, 40), (10, 11)), ((4, 40), (4, 17)), ((40, 5), (16, 5))])
def test_segments_that_are_too_long_are_cut_at_their_outer_ends(
    lengths: tuple[int, int], kept: tuple[int, int]
) -> None:
    a, b = segments(rows_of([make_shard([lengths])])[0])
    assert (len(a), len(b)) == kept
    assert b[0] == a[-1] + 1 == lengths[0] + 10


def test_a_pair_is_cut_with_equal_chances_between_any_two_sentences() -> None:
    rows = rows_of([make_shard([[2, 2, 2, 2]] * 3000)], length=64)
    counts = Counter(len(segments(row)[0]) for row in rows if (row > 9).sum() == 8)
    assert set(counts) == {2, 4, 6}
    total = sum(counts.values())
    assert total > 2500
    assert all(abs(count - total / 3) < 3 * np.sqrt(total * 2 / 9) for count in counts.values())


def test_any_cursor_gives_the_rows_from_there(documents: list[list[int]]) -> None:
    shards = [make_shard(documents[:90]), make_shard(documents[90:], first=20_000)]
    whole = rows_of(shards, 700)
    for first, count in ((0, 1), (5, 60), (100, 300), (699, 1)):
        assert np.array_equal(rows_of(shards, count, first=first), whole[first : first + count])


def test_rows_are_the_same_in_every_version() -> None:
    # A run that is resumed with another version must see the samples it would have seen, so these may never change.
    rows = rows_of([make_shard([[3, 4, 5, 6, 7], [2, 2]])], 6, length=16)
    assert [tuple(map(len, segments(row))) for row in rows] == [(6, 7), (7, 5), (2, 2), (2, 2), (3, 9), (6, 7)]
    assert rows[:, 1].tolist() == [22, 10, 36, 36, 10, 22]


def test_document_of_a_row_is_named(documents: list[list[int]]) -> None:
    shard = make_shard(documents)
    sampler = PairSampler([shard], sequence_length=S, seed=4, special=SPECIAL)
    for index, row in enumerate(sampler.batch_at(0, sampler.samples_per_epoch)):
        number = int(np.searchsorted(shard.ends, row[1] - 10, side="right"))
        assert sampler.documents(index) == [("a.jsonl", number + 1)]


def test_tokens_without_sentences_are_an_error() -> None:
    shard = make_shard([[3, 4]])
    bare = Shard(shard.name, shard.tokens, shard.index, shard.source_names)
    assert refusal(DataError, PairSampler, [bare], sequence_length=S, seed=1, special=SPECIAL) == (
        "Pairs of segments need tokens with an index of sentences, but these tokens have none. Prepare the tokens "
        'again with data.objective="masked".'
    )


def test_documents_of_one_sentence_are_an_error() -> None:
    assert refusal(DataError, PairSampler, [make_shard([[3], [4]])], sequence_length=S, seed=1, special=SPECIAL) == (
        "Pairs of segments need a document with at least 2 sentences, but the tokenized text contains no such "
        "document. Provide longer documents, or set data.pairs=false."
    )
