"""The split is exact and random, and training shards are equal."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.config import DataError
from crosscut.data.hashing import sha256
from crosscut.data.shards.writing import INDEX_DTYPE, TokenDocument, split_at_random, split_batch, write_shards
from crosscut.data.tokenization.encoding import EncodedBatch
from tests.refusals import refusal


def split(count: int, *, ratio: int = 29, seed: int = 0) -> tuple[list[int], list[int]]:
    """(training, validation) of the items 0, 1, ..."""
    chosen = list(split_at_random(range(count), train_to_validation=ratio, seed=seed))
    return [item for held, item in chosen if not held], [item for held, item in chosen if held]


@given(count=st.integers(2, 400), ratio=st.integers(1, 40), seed=st.integers(0, 2**70))
def test_every_document_goes_to_one_side_and_each_whole_block_gives_one_for_validation(
    count: int, ratio: int, seed: int
) -> None:
    train, validation = split(count, ratio=ratio, seed=seed)
    assert sorted(train + validation) == list(range(count))
    blocks = Counter(item // (ratio + 1) for item in validation)
    assert all(blocks[block] == 1 for block in range(count // (ratio + 1)))
    assert blocks[0] == 1
    assert max(blocks.values()) == 1


def test_split_follows_from_the_seed() -> None:
    assert split(900, seed=7) == split(900, seed=7)
    assert split(900, seed=7)[1] != split(900, seed=8)[1]


def test_split_is_the_same_in_every_version() -> None:
    assert split(12, ratio=2, seed=1234)[1] == [2, 3, 8, 9]


def test_every_place_of_a_block_is_chosen_alike() -> None:
    _, validation = split(30 * 6000, seed=3)
    chosen = Counter(item % 30 for item in validation)
    # 200 expected of each, standard deviation 14.
    assert all(130 < chosen[place] < 270 for place in range(30))


def test_last_short_block_gives_its_share() -> None:
    extra = sum(len(split(30 + 15, seed=seed)[1]) - 1 for seed in range(400))
    assert 150 < extra < 250  # one half of 400


def test_split_holds_back_one_document_only() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            read.append(number)
            yield number

    for count, _ in enumerate(split_at_random(items(), train_to_validation=999, seed=0), start=1):
        assert len(read) - count <= 1


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_documents_is_an_error(count: int) -> None:
    assert refusal(DataError, split, count) == (
        f"The corpus must have at least 2 documents, one for training and one for validation, but has {count}. "
        "Provide more documents. One .txt file is enough if it has more than 16,384 characters, because it is then "
        "cut into several documents."
    )


@given(lengths=st.lists(st.integers(1, 300), max_size=60), num_shards=st.integers(1, 7))
def test_shards_are_equal_within_one_document(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_shards: int
) -> None:
    documents = [(False, TokenDocument(bytes(2 * length), length, 0, number)) for number, length in enumerate(lengths)]
    folder = tmp_path_factory.mktemp("shards")
    train, validation = write_shards(documents, folder, num_shards=num_shards)
    tokens = [entry.tokens for entry in train]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert validation.documents == 0


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_files_hold_what_the_format_says(tmp_path: Path, dtype: str) -> None:
    batch = EncodedBatch(
        tokens=np.array([1, 2, 0, 3, 0, 258, 0], dtype=dtype),
        lengths=np.array([3, 2, 2]),
        origins=[(4, 17), (4, 18), (5, 2**40)],
        num_bytes=0,
        position=0,
    )
    documents = zip([True, False, True], split_batch(batch), strict=True)
    (train,), validation = write_shards(documents, tmp_path, num_shards=1)
    assert (train.name, train.tokens, train.documents) == ("train-0", 2, 1)
    assert (validation.name, validation.tokens, validation.documents) == ("validation", 5, 2)
    data = (tmp_path / "validation.tokens").read_bytes()
    width = int(dtype[-1])
    assert [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)] == [1, 2, 0, 258, 0]
    index = np.frombuffer((tmp_path / "validation.index").read_bytes(), dtype=INDEX_DTYPE)
    assert index.tolist() == [(3, 17, 4), (5, 2**40, 5)]
    assert validation.tokens_sha256 == sha256(tmp_path / "validation.tokens")
    assert validation.index_sha256 == sha256(tmp_path / "validation.index")
