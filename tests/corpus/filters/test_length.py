"""Short documents go, by tokens."""

import json
from pathlib import Path

import pytest

from crosscut.config.corpora import LengthConfig
from crosscut.corpus.documents import Drop
from crosscut.corpus.filters.length import LengthFilter
from crosscut.data import Tokenizer
from crosscut.data.tokenization.end_of_text import END_OF_TEXT
from tests.corpus.conftest import documents


@pytest.fixture
def bytes_tokenizer(tmp_path: Path) -> Path:
    """A token a byte."""
    path = tmp_path / "tokenizer.json"
    Tokenizer.train(["ab"], vocab_size=257).save(path)
    return path


def test_documents_of_fewer_tokens_go(bytes_tokenizer: Path) -> None:
    judgement = LengthFilter(LengthConfig(min_tokens=4), bytes_tokenizer)(
        documents("xyz", "wxyz", "", "a", "\u00fc\u00fc")
    )
    assert judgement.marks["tokens"].to_pylist() == [3, 4, 0, 1, 4]
    assert judgement.drops == [
        Drop(0, "too short", "3 tokens"), Drop(2, "too short", "0 tokens"), Drop(3, "too short", "1 token"),
    ]  # fmt: skip


def test_tokens_are_counted_of_all_batches(bytes_tokenizer: Path) -> None:
    lengths = [300_000, 5, 0, 200_000, 100_000, 7]
    judgement = LengthFilter(LengthConfig(min_tokens=0), bytes_tokenizer)(documents(*("x" * n for n in lengths)))
    assert judgement.marks["tokens"].to_pylist() == lengths
    assert judgement.drops == []


def test_no_documents_have_no_lengths(bytes_tokenizer: Path) -> None:
    judgement = LengthFilter(LengthConfig(), bytes_tokenizer)([])
    assert judgement.drops == []
    assert str(judgement.marks["tokens"].type) == "int64"


def test_another_tokenizer_in_the_same_place_is_seen(bytes_tokenizer: Path) -> None:
    judge = LengthFilter(LengthConfig(), bytes_tokenizer)
    assert judge(documents("the the")).marks["tokens"].to_pylist() == [7]
    Tokenizer.train(["the the the"] * 9, vocab_size=260).save(bytes_tokenizer)
    assert judge(documents("the the")).marks["tokens"].to_pylist() == [2]


def test_the_end_of_text_is_not_counted(bytes_tokenizer: Path) -> None:
    assert END_OF_TEXT in json.loads(bytes_tokenizer.read_text())["model"]["vocab"]
    assert LengthFilter(LengthConfig(), bytes_tokenizer)(documents("a")).marks["tokens"].to_pylist() == [1]
