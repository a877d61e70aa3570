"""The bytes of single tokens make up the text."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from crosscut.serving.tokens import TokenBytes, parts_of

TEXT = "Grüße, 世界! \N{HAPPY PERSON RAISING ONE HAND}\n\tfellow  citizens"


def test_bytes_of_byte_level_tokens_are_the_texts(model_folder: Path):
    file = model_folder / "tokenizer.json"
    spell = TokenBytes(file)
    ids = tokenizers.Tokenizer.from_file(str(file)).encode(TEXT, add_special_tokens=False).ids
    pieces = [spell(token) for token in ids]
    assert b"".join(pieces) == TEXT.encode()
    assert any(piece.decode(errors="ignore").encode() != piece for piece in pieces)  # some are parts of a character


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    """A tokenizer as Llama 2's: spaces spelled as blocks, unknown characters as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "wor", "ld"]
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("piece", "content"), [("▁hello", b" hello"), ("▁", b" "), ("<0xE4>", b"\xe4"), ("wor", b"wor")]
)
def test_bytes_of_sentencepiece_tokens(sentencepiece: Path, piece: str, content: bytes):
    inner = tokenizers.Tokenizer.from_file(str(sentencepiece))
    assert TokenBytes(sentencepiece)(inner.token_to_id(piece)) == content


def test_special_tokens_are_spelled_as_they_are(sentencepiece: Path):
    inner = tokenizers.Tokenizer.from_file(str(sentencepiece))
    assert TokenBytes(sentencepiece)(inner.token_to_id("</s>")) == b"</s>"


def test_an_id_of_nothing_has_no_bytes(sentencepiece: Path):
    assert TokenBytes(sentencepiece)(10_000) == b""


@pytest.mark.parametrize(
    ("text", "spelled", "parts"),
    [
        ("We go", [b"We", b" go"], ["We", " go"]),
        ("We go", [b"<s>", b" We", b" go"], ["", "We", " go"]),  # what comes before a text spells nothing of it
        ("<s>We go", [b"<s>", b"We", b" go"], ["<s>", "We", " go"]),
        ("", [b"<s>"], [""]),
        ("ü€!", [b"\xc3", b"\xbc\xe2", b"\x82", b"\xac!"], ["", "ü", "", "€!"]),
        ("a\N{REPLACEMENT CHARACTER}", [b"a", b"\xe2\x82"], ["a", "\N{REPLACEMENT CHARACTER}"]),
        ("a  b", [b"a", b"b"], ["a  ", "b"]),  # a tokenizer that drops spaces: all of the text is told at least
    ],
)
def test_a_text_is_cut_into_what_its_tokens_add(text: str, spelled: list[bytes], parts: list[str]):
    assert parts_of(text, spelled) == parts
    assert "".join(parts) == text
