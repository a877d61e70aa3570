"""Samples that the seed and their index decide, whatever the ranks and wherever one resumes."""

import hashlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from crosscut.config import IGNORED, DataConfig, DataError
from crosscut.config.data import MixedFolder
from crosscut.data import TokenFolder, masked_samples, masked_validation, open_tokens, prepare
from crosscut.data.sampler import Arrays
from tests.refusals import refusal

S = 64


def are_equal(first: Arrays, second: Arrays) -> bool:
    ours, theirs = first.given(), second.given()
    return ours.keys() == theirs.keys() and all(np.array_equal(array, theirs[name]) for name, array in ours.items())


def original(batch: Arrays) -> np.ndarray:
    return np.where(batch.targets == IGNORED, batch.tokens, batch.targets)


@pytest.fixture(params=[True, False], ids=["pairs", "packed"])
def form(request: pytest.FixtureRequest, config: DataConfig) -> DataConfig:
    return replace(config, pairs=request.param)


@pytest.fixture(scope="module")
def mixture(speeches: TokenFolder, tmp_path_factory: pytest.TempPathFactory, config: DataConfig) -> DataConfig:
    """The speeches, and a second folder with the same tokenizer, at 2 : 1."""
    folder = tmp_path_factory.mktemp("mixture")
    text = folder / "text.txt"
    text.write_text("The first sentence is here. The second one is longer than that. Is this a third?\n\n" * 3000)
    tokenizer = str(speeches.path / "tokenizer.json")
    made = DataConfig(text=(str(text),), tokenizer=tokenizer, objective="masked", num_shards=1)
    other = prepare(made, folder / "other", seed=1, workers=1, progress=False)
    folders = (MixedFolder(folder=str(speeches.path), weight=2), MixedFolder(folder=str(other.path), weight=1))
    return replace(config, mixture=folders)


def test_ranks_make_the_same_batch_together(speeches: TokenFolder, form: DataConfig) -> None:
    for step in (3, 90):  # also in later epochs
        alone, *ranks = (masked_samples(speeches, form, sequence_length=S, seed=1) for _ in range(5))
        whole = alone.batch_at(step * 16, 16)
        parts = [each.batch_from(step * 16, batch_size=16, rank=rank, size=4) for rank, each in enumerate(ranks)]
        for name, array in whole.given().items():
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), array)
    with pytest.raises(DataError, match=r"`batch_size` must be a multiple of the number of ranks"):
        masked_samples(speeches, form, sequence_length=S, seed=1).batch_from(0, batch_size=15, size=2)


def test_a_resumed_run_sees_the_samples_that_it_would_have_seen(speeches: TokenFolder, form: DataConfig) -> None:
    sampler = masked_samples(speeches, form, sequence_length=S, seed=1)
    for step in range(30):
        batch = sampler.batch_at(step * 12, 12)
    assert are_equal(masked_samples(speeches, form, sequence_length=S, seed=1).batch_at(29 * 12, 12), batch)
    assert not are_equal(masked_samples(speeches, form, sequence_length=S, seed=2).batch_at(29 * 12, 12), batch)


PROGRAM = """
import hashlib, sys
from pathlib import Path
from crosscut.config import DataConfig
from crosscut.data import TokenFolder, masked_samples
digest = hashlib.sha256()
for pairs in (True, False):
    config = DataConfig(objective="masked", pairs=pairs)
    sampler = masked_samples(TokenFolder.open(Path(sys.argv[1])), config, sequence_length=64, seed=1)
    for array in sampler.batch_at(100, 200).given().values():
        digest.update(array.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow  # starts Python; test_masks_are_the_same_in_every_version checks drawn masks, too
def test_another_process_sees_the_same_samples(speeches: TokenFolder, config: DataConfig) -> None:
    digest = hashlib.sha256()
    for pairs in (True, False):
        sampler = masked_samples(speeches, replace(config, pairs=pairs), sequence_length=S, seed=1)
        for array in sampler.batch_at(100, 200).given().values():
            digest.update(array.tobytes())
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(speeches.path)], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == digest.hexdigest()


def test_segments_are_swapped_as_the_order_says(speeches: TokenFolder, config: DataConfig) -> None:
    batch = masked_samples(speeches, config, sequence_length=S, seed=1).batch_at(0, 300)
    special = speeches.tokenizer().special_tokens()
    text = np.concatenate([shard.tokens[:] for shard in speeches.train]).tobytes()
    assert batch.order is not None
    for row, segments, mask, order in zip(original(batch), batch.segments, batch.mask, batch.order, strict=True):
        length = int(mask.sum())
        assert mask[:length].all()
        assert (row[length:] == special.padding).all()
        assert (segments[length:] == 0).all()
        first, last = np.flatnonzero(row == special.separator)
        assert (row[0], last) == (special.begin, length - 1)
        assert segments[:length].tolist() == [0] * (first + 1) + [1] * (last - first)
        both = [row[1:first], row[first + 1 : last]]
        in_order = np.concatenate(both[::-1] if order else both)
        assert in_order.astype(np.uint16).tobytes() in text


def test_packed_rows_hold_the_text_after_one_begin_token(speeches: TokenFolder, config: DataConfig) -> None:
    sampler = masked_samples(speeches, replace(config, pairs=False), sequence_length=S, seed=1)
    count = round(1 / sampler.epochs(1)[0])
    batch = sampler.batch_at(0, count)
    special = speeches.tokenizer().special_tokens()
    rows = original(batch)
    assert (rows[:, 0] == special.begin).all()
    assert batch.mask.all()
    assert not batch.segments.any()
    assert batch.order is None
    read = np.bincount(rows[:, 1:].ravel(), minlength=speeches.vocab_size)
    stored = sum(np.bincount(shard.tokens[:], minlength=speeches.vocab_size) for shard in speeches.train)
    assert (read <= stored).all()
    assert read.sum() > stored.sum() - 2 * S, "nearly every token is in one row of an epoch"


def test_a_separator_belongs_to_the_document_before_it(speeches: TokenFolder, config: DataConfig) -> None:
    batch = masked_samples(speeches, replace(config, pairs=False), sequence_length=1024, seed=1).batch_at(0, 30)
    separator = speeches.tokenizer().special_tokens().separator
    assert batch.documents is not None
    assert batch.positions is not None
    for row, documents, positions in zip(original(batch), batch.documents, batch.positions, strict=True):
        number = place = 0
        for token, document, position in zip(row, documents, positions, strict=True):
            assert (document, position) == (number, place)
            number, place = (number + 1, 0) if token == separator else (number, place + 1)
    assert batch.documents.max() > 0


def test_every_epoch_masks_other_words(speeches: TokenFolder, form: DataConfig) -> None:
    sampler = masked_samples(speeches, form, sequence_length=S, seed=1)
    count = round(1 / sampler.epochs(1)[0])
    first, second = ({row.tobytes() for row in sampler.batch_at(epoch * count, count).tokens} for epoch in range(2))
    assert len(first & second) < 0.01 * count


def test_mixture_gives_each_folder_its_share(mixture: DataConfig, speeches: TokenFolder, form: DataConfig) -> None:
    mixture = replace(mixture, pairs=form.pairs)
    tokens = open_tokens(mixture, speeches.path, verify=True)
    sampler = masked_samples(tokens, mixture, sequence_length=S, seed=1)
    batch = sampler.batch_at(0, 300)
    names = [sampler.documents(index)[0][0] for index in range(300)]
    assert abs(sum(name.endswith(".txt") for name in names) - 100) < 25
    again = masked_samples(tokens, mixture, sequence_length=S, seed=1)
    assert np.array_equal(again.batch_at(123, 50).tokens, batch.tokens[123:173])
    assert len(sampler.epochs(300)) == 2


def test_validation_reads_each_sample_once_and_always_the_same(speeches: TokenFolder, form: DataConfig) -> None:
    validation = masked_validation(speeches, form, sequence_length=S, seed=1)
    runs = [list(validation.batches(batch_size=6)) for _ in range(2)]
    assert all(are_equal(a, b) for a, b in zip(*runs, strict=True))
    assert {batch.tokens.shape for batch in runs[0]} == {(6, S)}
    assert len(runs[0]) == -(-validation.num_samples // 6)
    is_real = np.concatenate([(batch.targets != IGNORED).any(axis=1) for batch in runs[0]])
    assert is_real.sum() == validation.num_samples > 50
    rows = np.concatenate([original(batch) for batch in runs[0]])[is_real]
    assert len({row.tobytes() for row in rows}) == len(rows)
    if form.pairs:
        order = np.concatenate([batch.order for batch in runs[0]])
        assert ((order != IGNORED) == is_real).all()
    parts = [list(validation.batches(batch_size=6, rank=rank, size=2)) for rank in range(2)]
    for whole, *halves in zip(runs[0], *parts, strict=True):
        assert np.array_equal(np.concatenate([half.targets for half in halves]), whole.targets)


def test_a_limited_validation_reads_the_first_samples(speeches: TokenFolder, form: DataConfig) -> None:
    validation = masked_validation(speeches, form, sequence_length=S, seed=1)
    (batch,) = validation.batches(batch_size=8, limit=5)
    whole = next(validation.batches(batch_size=8))
    assert np.array_equal(batch.tokens[:5], whole.tokens[:5])
    assert (batch.targets[5:] == IGNORED).all()
    assert (batch.targets[:5] != IGNORED).any(axis=1).all()


def test_validation_of_a_mixture_has_the_folders_shares(mixture: DataConfig, speeches: TokenFolder) -> None:
    tokens = open_tokens(mixture, speeches.path, verify=False)
    validation = masked_validation(tokens, mixture, sequence_length=S, seed=1)
    alone = [masked_validation(folder, mixture, sequence_length=S, seed=1).num_samples for folder in tokens.folders]
    assert validation.num_samples == int(min(alone[0] * 3 / 2, alone[1] * 3))


def test_text_shorter_than_a_row_is_an_error(speeches: TokenFolder, config: DataConfig) -> None:
    most = max(shard.num_tokens for shard in speeches.train)
    assert refusal(
        DataError, masked_samples, speeches, replace(config, pairs=False), sequence_length=10**6, seed=1
    ) == (
        "A shard must have at least `training.sequence_length` (1,000,000) tokens, but the largest shard of `train` "
        f"has {most:,}. Provide more text, or lower `training.sequence_length` or `data.num_shards`. The token folder "
        f"is `{speeches.path}`."
    )
