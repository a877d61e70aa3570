"""Each portion once an epoch, in an order that the seed alone decides, whatever the ranks and wherever one resumes."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.config import IGNORED, DataError
from crosscut.data import Sampler, Shard, Tokenizer, ValidationSampler
from crosscut.data.shards.writing import INDEX_DTYPE
from crosscut.data.tokenization.token_bytes import TokenBytes
from tests.data.conftest import write_sentencepiece
from tests.refusals import refusal

S = 7
MakeShard = Callable[..., Shard]


@pytest.fixture
def shards(make_shard: MakeShard) -> list[Shard]:
    """Three shards whose tokens are all different: 100 of documents of 1 to 13 tokens, one big document, nothing."""
    lengths = [number % 13 + 1 for number in range(100)]
    return [
        make_shard(lengths, first=0, name="train-0"),
        make_shard([200], first=10_000, name="train-1"),
        make_shard([], first=20_000, name="train-2"),
    ]


def epoch_of(sampler: Sampler, epoch: int) -> np.ndarray:
    return sampler.batch_at(epoch * sampler.samples_per_epoch, sampler.samples_per_epoch)


def test_each_portion_comes_exactly_once_an_epoch(shards: list[Shard]) -> None:
    sampler = Sampler(shards, sequence_length=S, seed=1)
    assert sampler.samples_per_epoch == sum((shard.num_tokens - 1) // S for shard in shards if shard.num_tokens)
    for epoch in range(3):
        rows = epoch_of(sampler, epoch)
        assert rows.shape == (sampler.samples_per_epoch, S + 1)
        inputs = rows[:, :-1].ravel()
        assert len(np.unique(inputs)) == len(inputs)
        for shard in shards:
            dropped = np.setdiff1d(shard.tokens, inputs)
            assert len(dropped) <= S


def test_portions_are_cut_from_shuffled_whole_documents(shards: list[Shard]) -> None:
    rows = epoch_of(Sampler(shards, sequence_length=S, seed=1), 0)
    # A portion's last token begins the next portion, which chains the portions back to the flattened shard.
    following = {int(row[0]): row for row in rows}
    start = set(following) - {int(row[-1]) for row in rows}
    assert len(start) == 2  # one for each shard that has portions
    for first in start:
        flat = [first]
        while (row := following.get(flat[-1])) is not None:
            flat.extend(row[1:].tolist())
        shard = shards[0] if first < 10_000 else shards[1]
        begins = {0 if number == 0 else int(shard.ends[number - 1]) for number in range(shard.num_documents)}
        jumps = [after for before, after in itertools.pairwise(flat) if after != before + 1]
        assert {jump - int(shard.tokens[0]) for jump in jumps} <= begins
        assert len(jumps) > 80 or shard.num_documents == 1


def test_shards_documents_and_portions_are_shuffled_anew_every_epoch(make_shard: MakeShard) -> None:
    shards = [make_shard([5] * 40, first=number * 1000) for number in range(4)]
    sampler = Sampler(shards, sequence_length=S, seed=2)
    epochs = [epoch_of(sampler, epoch) for epoch in range(6)]
    orders = [tuple(dict.fromkeys((rows[:, 0] // 1000).tolist())) for rows in epochs]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(orders)) > 1
    portions = [{tuple(row) for row in rows.tolist()} for rows in epochs]
    assert len(portions[0] & portions[1]) < len(portions[0]) // 4  # other documents stand side by side
    assert all((np.diff(rows[:, 0]) < 0).sum() > 20 for rows in epochs)


def test_shards_are_processed_one_after_the_other(shards: list[Shard]) -> None:
    owners = epoch_of(Sampler(shards, sequence_length=S, seed=1), 0)[:, 0] >= 10_000
    assert np.count_nonzero(np.diff(owners)) == 1


def test_order_follows_from_the_seed(shards: list[Shard]) -> None:
    first, same, other = (epoch_of(Sampler(shards, sequence_length=S, seed=seed), 0) for seed in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)


@settings(max_examples=50)
@given(first=st.integers(0, 1000), count=st.integers(1, 200))
def test_any_cursor_gives_the_samples_from_there(first: int, count: int) -> None:
    index = np.zeros(60, dtype=[("end", "<u8"), ("record", "<u8"), ("source", "<u8")])
    index["end"] = np.arange(1, 61) * 11
    shards = [Shard(f"train-{n}", np.arange(n * 1000, n * 1000 + 660), index, ("a",)) for n in range(2)]
    sampler = Sampler(shards, sequence_length=S, seed=4)
    rows = sampler.batch_at(first, count)
    fresh = Sampler(shards, sequence_length=S, seed=4)
    assert np.array_equal(rows[-1], fresh.sample(first + count - 1))
    assert np.array_equal(rows, np.stack([sampler.sample(first + place) for place in range(count)]))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_parts_of_the_ranks_make_the_same_global_batch(shards: list[Shard], size: int) -> None:
    whole = Sampler(shards, sequence_length=S, seed=1)
    for step in (0, 5, 17, 100):
        parts = [
            Sampler(shards, sequence_length=S, seed=1).batch(step, batch_size=12, rank=rank, size=size)
            for rank in range(size)
        ]
        rows = whole.batch_at(step * 12, 12)
        assert all(part.tokens.shape == part.targets.shape == (12 // size, S) for part in parts)
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), rows[:, :-1])
        assert np.array_equal(np.concatenate([part.targets for part in parts]), rows[:, 1:])


def test_ids_are_64_bit(shards: list[Shard]) -> None:
    assert Sampler(shards, sequence_length=S, seed=1).sample(0).dtype == np.int64


def test_documents_of_a_sample_are_named(shards: list[Shard]) -> None:
    sampler = Sampler(shards, sequence_length=S, seed=1)
    for index in range(sampler.samples_per_epoch):
        tokens = sampler.sample(index)
        shard = shards[0] if tokens[0] < 10_000 else shards[1]
        numbers = np.searchsorted(shard.ends, tokens - int(shard.tokens[0]), side="right")
        expected = list(dict.fromkeys(("made.jsonl", int(number) + 1) for number in numbers))
        assert sampler.documents(index) == expected


def test_order_is_the_same_in_every_version(make_shard: MakeShard) -> None:
    # A run that is resumed with another numpy must see the samples it would have seen, so these may never change.
    shards = [make_shard([3, 4, 5, 6], first=number * 100) for number in range(2)]
    sampler = Sampler(shards, sequence_length=S, seed=1234)
    assert [sampler.batch_at(epoch * 4, 4)[:, 0].tolist() for epoch in (0, 1, 7)] == [
        [112, 104, 14, 7],
        [12, 4, 104, 112],
        [110, 103, 10, 3],
    ]


def test_corpus_shorter_than_one_sequence_is_an_error(make_shard: MakeShard) -> None:
    shards = [make_shard([600, 400]), make_shard([1024])]
    assert Sampler(shards, sequence_length=1023, seed=0).samples_per_epoch == 1
    assert refusal(DataError, Sampler, shards, sequence_length=1024, seed=0) == (
        "A training shard must have at least `training.sequence_length` + 1 = 1,025 tokens, but the largest has 1,024 "
        "(shards: 2, tokens in all shards: 2,024). Provide more text, or lower `training.sequence_length` or "
        "`data.num_shards`."
    )


def test_batch_that_the_ranks_do_not_divide_is_an_error(shards: list[Shard]) -> None:
    message = r"^`batch_size` must be a multiple of the number of ranks that share a batch \(3\), but is 8\. Try 9\.$"
    with pytest.raises(DataError, match=message):
        Sampler(shards, sequence_length=S, seed=0).batch(0, batch_size=8, rank=0, size=3)
    with pytest.raises(DataError, match=message):
        next(ValidationSampler(shards[0], sequence_length=S).batches(batch_size=8, rank=0, size=3))


@given(
    num_tokens=st.integers(2, 200),
    sequence_length=st.integers(1, 30),
    ranks=st.sampled_from([(1, 1), (4, 2), (6, 3), (4, 4), (64, 2)]),
)
def test_validation_counts_every_token_once_over_all_ranks(
    num_tokens: int, sequence_length: int, ranks: tuple[int, int]
) -> None:
    batch_size, size = ranks
    index = np.array([(num_tokens, 1, 0)], dtype=[("end", "<u8"), ("record", "<u8"), ("source", "<u8")])
    shard = Shard("validation", np.arange(1, num_tokens + 1, dtype=np.uint16), index, ("a",))
    sampler = ValidationSampler(shard, sequence_length=sequence_length)
    parts = [list(sampler.batches(batch_size=batch_size, rank=rank, size=size)) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    pairs = []
    for step in zip(*parts, strict=True):
        for tokens, targets in ((batch.tokens, batch.targets) for batch in step):
            assert tokens.shape == targets.shape == (batch_size // size, sequence_length)
            counted = targets != IGNORED
            pairs += zip(tokens[counted].tolist(), targets[counted].tolist(), strict=True)
    assert pairs == [(token, token + 1) for token in range(1, num_tokens)]


@given(num_tokens=st.integers(2, 400), sequence_length=st.integers(1, 12), limit=st.integers(1, 60))
def test_a_limited_validation_is_spread_over_the_whole_shard(num_tokens: int, sequence_length: int, limit: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    shard = Shard("validation", tokens, np.array([(num_tokens, 1, 0)], dtype=INDEX_DTYPE), ("a",))
    sampler = ValidationSampler(shard, sequence_length=sequence_length)
    count = sampler.count(limit)
    firsts = np.array([sampler.sample_at(position, limit)[0][0] for position in range(count)]) // sequence_length
    gaps = np.diff(firsts, prepend=-1, append=sampler.num_samples)
    assert gaps.min() >= 1
    inner = gaps[1:-1]
    assert inner.size == 0 or inner.max() - inner.min() <= 1
    assert gaps.max() <= -(-sampler.num_samples // count) + 1


@pytest.mark.parametrize("limit", [2, 3, 8])
def test_a_limited_validation_reads_both_of_two_documents(make_shard: MakeShard, limit: int) -> None:
    """The first sequences would all come from the first book."""
    sampler = ValidationSampler(make_shard([1000, 1000]), sequence_length=10)
    parts = [sampler.batches(batch_size=4, rank=rank, size=2, limit=limit) for rank in (0, 1)]
    ranks = [np.concatenate([batch.tokens for batch in part]) for part in parts]
    whole = np.concatenate([batch.tokens for batch in sampler.batches(batch_size=4, limit=limit)])
    from_second = int((whole[:limit, 0] >= 1000).sum())
    assert limit // 2 <= from_second <= (limit + 1) // 2
    assert sorted(map(tuple, np.concatenate(ranks).tolist())) == sorted(map(tuple, whole.tolist()))


def test_validation_can_be_limited(make_shard: MakeShard) -> None:
    sampler = ValidationSampler(make_shard([101]), sequence_length=10)
    assert sampler.num_samples == 10
    batches = list(sampler.batches(batch_size=4, limit=5))
    assert len(batches) == 2
    assert sum(np.count_nonzero(batch.targets != IGNORED) for batch in batches) == 50
    assert len(list(sampler.batches(batch_size=4, limit=1000))) == 3


def test_validation_set_without_a_token_to_predict_is_an_error(make_shard: MakeShard) -> None:
    assert (
        refusal(DataError, ValidationSampler, make_shard([1], name="validation"), sequence_length=10)
        == "The validation set must have at least 2 tokens, but has 1. Provide more text."
    )


@pytest.mark.parametrize("limit", [0, 1, 3, 1000])
@pytest.mark.parametrize("make", ["byte-level", "sentencepiece"])
def test_validation_bytes_are_those_of_the_targets(tokenizer_file: Path, tmp_path: Path, make: str, limit: int) -> None:
    """A character of a byte-level BPE may lie on the border of the scored part, and a document of no token in it."""
    file = tokenizer_file if make == "byte-level" else write_sentencepiece(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(file)
    texts = ["hello world", "\N{EURO SIGN}" * 5, "hello hello \N{EURO SIGN}", "world"]
    shard = shard_of([[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts])
    sampler = ValidationSampler(shard, sequence_length=S)
    pairs = ((batch.tokens, batch.targets) for batch in sampler.batches(batch_size=1, limit=limit))
    read, targets = (np.concatenate(rows).ravel() for rows in zip(*pairs, strict=True))
    scored = targets[targets != IGNORED].tolist()
    spell = TokenBytes.load(file)
    expected = sum(len(spell(token)) for token in scored if token != tokenizer.end_of_text)
    if make == "sentencepiece":  # the decoder drops the space before each text, except before the first, not a target
        expected -= int(((read == tokenizer.end_of_text) & (targets != IGNORED)).sum())
    assert sampler.num_bytes(tokenizer, limit=limit) == expected
    first = len(texts[0].encode()) - tokenizer.num_bytes(shard.tokens[:1])
    if limit in (0, 1000):
        assert expected == first + sum(len(text.encode()) for text in texts[1:])


def shard_of(documents: list[list[int]]) -> Shard:
    index = np.zeros(len(documents), dtype=INDEX_DTYPE)
    index["end"] = np.cumsum([len(document) for document in documents])
    return Shard("validation", np.concatenate(documents).astype(np.uint16), index, ("a.txt",))
