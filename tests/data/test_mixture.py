"""Mixtures of token folders: weights by tokens, in an order that the seed, the weights and the index decide."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.config import IGNORED, DataConfig, DataError
from crosscut.config.data import MixedFolder
from crosscut.data import Sampler, Shard, TokenMixture, ValidationSampler, prepare, training_samples, validation_samples
from crosscut.data.mixture import BLOCK_SAMPLES, MixedSampler, MixedValidationSampler, folders_of, shares_of
from tests.data.conftest import make_texts, write_jsonl
from tests.refusals import refusal

S = 4
MakeShard = Callable[..., Shard]
FIRSTS = (0, 100_000, 200_000)
"""First token of each folder, so that a token says where it comes from."""


@pytest.fixture
def samplers(make_shard: MakeShard) -> list[Sampler]:
    """Three folders: of 40 samples in one shard, of 12 in three, and of 1,000 in one."""
    shards = [[make_shard([41, 120])], [make_shard([17], first=FIRSTS[1] + 17 * i) for i in range(3)]]
    shards.append([make_shard([4_001], first=FIRSTS[2])])
    return [Sampler(each, sequence_length=S, seed=3) for each in shards]


def folders(rows: np.ndarray) -> np.ndarray:
    """Number of the folder of each sample."""
    return np.searchsorted(FIRSTS, rows[:, 0], side="right") - 1


@settings(max_examples=20)
@given(weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=5), seed=st.integers(0, 9))
def test_every_block_has_each_folders_share_up_to_one_sample(weights: list[float], seed: int) -> None:
    shard = Shard("train-0", np.arange(9, dtype=np.uint16), np.array([(9, 1, 0)], "<u8,<u8,<u8"), ("made",))
    shard.index.dtype.names = ("end", "record", "source")
    samples = MixedSampler([Sampler([shard], sequence_length=S, seed=1)] * len(weights), weights, seed=seed)
    before = [samples._samples_before(block) for block in range(40)]
    counts = np.diff(before, axis=0)
    assert counts.sum(axis=1).tolist() == [BLOCK_SAMPLES] * 39
    for number, share in enumerate(shares_of(weights)):
        assert abs(counts[:, number] - share * BLOCK_SAMPLES).max() < 1 + 1e-6
        assert abs(before[-1][number] - 39 * share * BLOCK_SAMPLES) < 3, "rounding does not add up"
        assert np.bincount(samples._block(7), minlength=len(weights))[number] == counts[7, number]


def test_weights_count_tokens_and_not_files_documents_or_sizes(samplers: list[Sampler]) -> None:
    rows = MixedSampler(samplers, [1, 2, 1], seed=5).batch_at(0, 2 * BLOCK_SAMPLES)
    shares = np.bincount(folders(rows)) / len(rows)
    assert shares.tolist() == pytest.approx([0.25, 0.5, 0.25], abs=2 / BLOCK_SAMPLES)


def test_a_folders_samples_come_in_the_order_of_a_run_on_it_alone(samplers: list[Sampler]) -> None:
    samples = MixedSampler(samplers, [0.2, 0.3, 0.5], seed=5)
    rows = samples.batch_at(0, 3000)
    found = folders(rows)
    for number, sampler in enumerate(samplers):
        own = rows[found == number]
        assert np.array_equal(own, sampler.batch_at(0, len(own)))
    assert len(set(found[:50].tolist())) == 3, "the folders are mixed from the start"
    assert samples.epochs(3000) == tuple(
        (found == number).sum() / sampler.samples_per_epoch for number, sampler in enumerate(samplers)
    )


def test_a_sample_depends_on_its_index_alone(samplers: list[Sampler]) -> None:
    whole = MixedSampler(samplers, [0.2, 0.3, 0.5], seed=5).batch_at(0, 3 * BLOCK_SAMPLES)
    for first, count in ((1, 1), (1000, 100), (BLOCK_SAMPLES, 5), (2 * BLOCK_SAMPLES - 1, 2), (3000, 72)):
        resumed = MixedSampler(samplers, [2, 3, 5], seed=5)
        assert np.array_equal(resumed.batch_at(first, count), whole[first : first + count])
    assert not np.array_equal(MixedSampler(samplers, [2, 3, 5], seed=6).batch_at(0, 100), whole[:100])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_divide_the_batch(samplers: list[Sampler], size: int) -> None:
    samples = MixedSampler(samplers, [0.2, 0.3, 0.5], seed=5)
    for step in (0, 85, 86):
        slices = [samples.batch(step, batch_size=12, rank=rank, size=size).tokens for rank in range(size)]
        assert np.array_equal(np.concatenate(slices), samples.batch_at(12 * step, 12)[:, :-1])


def test_documents_are_those_of_the_folder(samplers: list[Sampler]) -> None:
    samples = MixedSampler(samplers, [0.2, 0.3, 0.5], seed=5)
    for index in range(20):
        row = samples.sample(index)
        number = int(folders(row[None])[0])
        same = [i for i in range(20) if np.array_equal(samplers[number].sample(i), row)]
        assert samples.documents(index) == samplers[number].documents(same[0])


def test_validation_has_the_folders_shares_as_far_as_the_first_one_that_runs_out(make_shard: MakeShard) -> None:
    lengths = (401, 41, 1201)  # 100, 10 and 300 samples
    pairs = zip(lengths, FIRSTS, strict=True)
    parts = [ValidationSampler(make_shard([length], first=first), sequence_length=S) for length, first in pairs]
    samples = MixedValidationSampler(parts, [5, 1, 4])
    assert samples.count(0) == 100  # the second folder has 10
    for limit, counts in ((0, [50, 10, 40]), (20, [10, 2, 8]), (1, [1, 1, 1])):
        rows = np.concatenate([batch.tokens for batch in samples.batches(batch_size=4, limit=limit)])[: sum(counts)]
        assert np.bincount(folders(rows)).tolist() == counts
    whole = [batch.targets for batch in samples.batches(batch_size=8, limit=20)]
    halves = [samples.batches(batch_size=8, rank=rank, size=2, limit=20) for rank in range(2)]
    for first, second, targets in zip(*halves, whole, strict=True):
        assert np.array_equal(np.concatenate([first.targets, second.targets]), targets)
    assert (np.concatenate(whole) != IGNORED).sum() == 20 * S


@pytest.fixture
def two(tmp_path: Path, tokenizer_file: Path) -> list[Path]:
    """Two folders with the same tokenizer."""
    made = []
    for seed, name in enumerate(("books", "mail")):
        text = write_jsonl(tmp_path / f"{name}.jsonl", make_texts(60, seed=seed))
        config = DataConfig(text=(str(text),), tokenizer=str(tokenizer_file), num_shards=seed + 1)
        made.append(prepare(config, tmp_path / name, seed=1, progress=False).path)
    return made


def mixed(*folders: Path) -> DataConfig:
    return DataConfig(mixture=tuple(MixedFolder(folder=str(path), weight=i + 1) for i, path in enumerate(folders)))


def test_a_mixture_opens_its_folders(two: list[Path], tmp_path: Path) -> None:
    tokens = prepare(mixed(*two), tmp_path / "unused", seed=1)
    assert isinstance(tokens, TokenMixture)
    assert list(folders_of(tokens).values()) == pytest.approx([1 / 3, 2 / 3])
    assert [folder.path for folder in folders_of(tokens)] == two
    samples = training_samples(tokens, sequence_length=8, seed=1)
    validation = validation_samples(tokens, sequence_length=8)
    assert samples.batch(0, batch_size=6).tokens.shape == (6, 8)
    parts = [ValidationSampler(folder.validation, sequence_length=8) for folder in tokens.folders]
    expected = sum(part.num_bytes(tokens.tokenizer(), limit=limit) for part, limit in zip(parts, (2, 4), strict=True))
    assert validation.num_bytes(tokens.tokenizer(), limit=6) == expected
    assert not (tmp_path / "unused").exists()


def test_a_missing_folder_is_told(two: list[Path], tmp_path: Path) -> None:
    message = r"gone` must be a folder of token shards, but has no manifest\.json\. Make the folder with"
    with pytest.raises(DataError, match=message):
        prepare(mixed(two[0], tmp_path / "gone"), tmp_path / "unused", seed=1)


def test_folders_with_different_tokenizers_are_told(two: list[Path], tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "other.jsonl", make_texts(60, seed=7))
    other = prepare(DataConfig(text=(str(text),), vocab_size=280), tmp_path / "other", seed=1, progress=False).path
    assert refusal(DataError, prepare, mixed(*two, other), tmp_path / "unused", seed=1) == (
        f"The folders of `data.mixture` must have the same tokenizer, but the tokenizers of `{other}` and "
        f"`{two[0]}` differ. Prepare the tokens of `{other}` again with data.tokenizer={two[0] / 'tokenizer.json'}."
    )


def test_folders_that_end_documents_with_different_ids_are_told(two: list[Path], tmp_path: Path) -> None:
    manifest = two[1] / "manifest.json"
    table = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**table, "end_of_text": 5}))
    with pytest.raises(DataError, match="must have the same tokenizer"):
        prepare(mixed(*two), tmp_path / "unused", seed=1)


def test_a_folder_that_is_too_short_is_named(two: list[Path]) -> None:
    tokens = TokenMixture.open(mixed(*two), verify=False)
    with pytest.raises(DataError, match=rf"must have at least .* The token folder is `{two[0]}`\.$"):
        training_samples(tokens, sequence_length=1_000_000, seed=1)
