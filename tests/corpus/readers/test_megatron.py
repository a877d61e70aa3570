"""Megatron-LM's pairs of files, back to text."""

from pathlib import Path

import numpy as np
import pytest

from crosscut.config import DataError
from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers import RawText, Reject, Skip
from crosscut.corpus.readers.files import find_source
from crosscut.data import Tokenizer
from tests.corpus.reads import read
from tests.data.conftest import write_indexed
from tests.refusals import refusal

TEXTS = ["It was the best of times.", "It was the wörst of times.\n\nIt was.", " "]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    Tokenizer.train(TEXTS, vocab_size=300).save(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


@pytest.fixture
def pair(tmp_path: Path, tokenizer: Path) -> Path:
    """Each document ends with an end of text, as Megatron's tools write them."""
    loaded = Tokenizer.load(tokenizer)
    write_indexed(tmp_path / "a", [[*loaded.encode(text), loaded.end_of_text] for text in TEXTS], np.uint16)
    return tmp_path / "a.idx"


def test_documents_come_back_as_text(pair: Path, tokenizer: Path) -> None:
    first, second, blank = read(pair, tokenizer=str(tokenizer))
    assert ([first.text, second.text], [first.record, second.record]) == (TEXTS[:2], [1, 2])
    assert second.position == (pair.stat().st_size + pair.with_suffix(".bin").stat().st_size) * 2 // 3
    assert blank == Skip("blank", 3)


def test_ids_that_the_tokenizer_does_not_have_are_rejected(tmp_path: Path, tokenizer: Path) -> None:
    write_indexed(tmp_path / "a", [[5, 40_000], [5, 6]], np.uint16)
    reject, text = read(tmp_path / "a.idx", tokenizer=str(tokenizer))
    assert isinstance(reject, Reject) and isinstance(text, RawText)
    assert (reject.place, reject.rule) == ("document 1", "other tokenizer")
    size = Tokenizer.load(tokenizer).vocab_size
    assert reject.reason == f"the token ids go from 5 to 40000, but the tokenizer has ids 0 to {size - 1}"


def test_document_that_is_too_long_is_rejected(pair: Path, tokenizer: Path) -> None:
    _, reject, _ = read(pair, tokenizer=str(tokenizer), max_bytes=len(TEXTS[0]))
    assert (reject.place, reject.rule) == ("document 2", "too long")


def test_pair_that_is_cut_short_is_rejected(pair: Path, tokenizer: Path) -> None:
    data = pair.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-2])
    (reject,) = read(pair, tokenizer=str(tokenizer))
    assert (reject.place, reject.rule) == ("byte 0", "damaged file")
    assert reject.lost == pair.stat().st_size + data.stat().st_size


def test_index_without_its_tokens_is_an_error(pair: Path) -> None:
    pair.with_suffix(".bin").unlink()
    assert refusal(DataError, find_source, SourceConfig(name="old", files=(str(pair),))) == (
        f"`{pair.with_suffix('.bin')}` must be a readable file, but is not: No such file or directory. Check the path."
    )


def test_version_changes_with_the_tokens(pair: Path) -> None:
    (before,) = find_source(SourceConfig(name="old", files=(str(pair),))).files
    pair.with_suffix(".bin").touch()
    assert find_source(SourceConfig(name="old", files=(str(pair),))).files != [before]
