"""The bytes of single tokens make up the text."""

from pathlib import Path

import pytest
import tokenizers

from crosscut.data.tokenization.token_bytes import TokenBytes
from tests.data.conftest import write_sentencepiece

TEXT = "Grüße, 世界! \N{HAPPY PERSON RAISING ONE HAND}\n\tfellow  citizens"


def test_bytes_of_byte_level_tokens_are_the_texts(tokenizer_file: Path):
    spell = TokenBytes.load(tokenizer_file)
    ids = tokenizers.Tokenizer.from_file(str(tokenizer_file)).encode(TEXT, add_special_tokens=False).ids
    pieces = [spell(token) for token in ids]
    assert b"".join(pieces) == TEXT.encode()
    assert any(piece.decode(errors="ignore").encode() != piece for piece in pieces)  # some are parts of a character


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    return write_sentencepiece(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("piece", "content"), [("▁hello", b" hello"), ("▁", b" "), ("<0xE4>", b"\xe4"), ("wor", b"wor")]
)
def test_bytes_of_sentencepiece_tokens(sentencepiece: Path, piece: str, content: bytes):
    inner = tokenizers.Tokenizer.from_file(str(sentencepiece))
    assert TokenBytes.load(sentencepiece)(inner.token_to_id(piece)) == content


def test_special_tokens_are_spelled_as_they_are(sentencepiece: Path):
    inner = tokenizers.Tokenizer.from_file(str(sentencepiece))
    assert TokenBytes.load(sentencepiece)(inner.token_to_id("</s>")) == b"</s>"


def test_an_id_of_nothing_has_no_bytes(sentencepiece: Path):
    assert TokenBytes.load(sentencepiece)(10_000) == b""


def test_single_bytes_of_sentencepiece_are_told_apart(sentencepiece: Path, tokenizer_file: Path):
    inner = tokenizers.Tokenizer.from_file(str(sentencepiece))
    spell = TokenBytes.load(sentencepiece)
    assert not spell.is_byte_level
    assert [spell.is_byte(inner.token_to_id(piece)) for piece in ("<0xE4>", "wor", "</s>")] == [True, False, False]
    assert TokenBytes.load(tokenizer_file).is_byte_level
