"""gigatoken is taken where it gives the ids of the tokenizers library, and only there."""

import json
import random
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner

from crosscut.data import Tokenizer
from crosscut.data.tokenization import fast_encoder
from crosscut.data.tokenization.end_of_text import END_OF_TEXT
from crosscut.data.tokenization.fast_encoder import FastEncoder

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ODD = r"[^aeiou ]+| ?[aeiou]+| +"  # the expression of no published tokenizer


@pytest.fixture(scope="session")
def table(tokenizer_file: Path) -> dict[str, Any]:
    """A `tokenizer.json` of GPT-2's kind."""
    return json.loads(tokenizer_file.read_text(encoding="utf-8"))


def make(table: dict[str, Any], **changes: Any) -> Tokenizer:
    return Tokenizer(Inner.from_str(json.dumps({**table, **changes})))


def encoded_by_the_library(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*tokenizer.encode(text), tokenizer.end_of_text)]


def token(content: str, number: int, **fields: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False, **fields}
    return {"id": number, "content": content, **flags}


def split(expression: str) -> dict[str, Any]:
    splitter = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [splitter, level]}


def test_a_tokenizer_of_gpt2s_kind_is_encoded_by_gigatoken(tokenizer_file: Path) -> None:
    assert Tokenizer.load(tokenizer_file).documents.engine == "gigatoken"
    assert Tokenizer.train(["a text"] * 9, vocab_size=300).documents.engine == "gigatoken"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_file)


@settings(max_examples=100)
@given(texts=st.lists(st.text(max_size=200), max_size=5))
def test_any_texts_get_the_ids_of_the_library(tokenizer: Tokenizer, texts: list[str]) -> None:
    tokens, lengths = tokenizer.documents.encode(texts)
    assert tokens.tolist() == encoded_by_the_library(tokenizer, texts)
    assert lengths.tolist() == [len(tokenizer.encode(text)) + 1 for text in texts]


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
}
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama 3's expression": ({"pre_tokenizer": split(LLAMA_3)}, "gigatoken"),
    "an expression of its own": ({"pre_tokenizer": split(ODD)}, "tokenizers"),
    "a space in front": (
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        "gigatoken",
    ),
    "a normalizer": ({"normalizer": {"type": "Lowercase"}}, "tokenizers"),
    "a template around texts": ({"post_processor": TEMPLATE}, "gigatoken"),
    "words of text": ({"added_tokens": [token(END_OF_TEXT, 0, special=True), token("rank", 300)]}, "gigatoken"),
    "several special tokens": (
        {"added_tokens": [token(END_OF_TEXT, 0, special=True), token("<|user|>", 301, special=True)]},
        "gigatoken",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_kinds_get_the_ids_of_the_library_too(table: dict[str, Any], name: str) -> None:
    changes, engine = VARIANTS[name]
    tokenizer = make(table, **changes)
    texts = [*fast_encoder.SAMPLES, "every rank meets <|user|> others<|endoftext|> at a crank", "It's 12345 O'CLOCK"]
    tokens, _ = tokenizer.documents.encode(texts)
    assert tokens.tolist() == encoded_by_the_library(tokenizer, texts)
    assert tokenizer.documents.engine == engine


def test_a_vocabulary_without_some_bytes_is_left_to_the_library(table: dict[str, Any]) -> None:
    vocabulary = {entry: number for entry, number in table["model"]["vocab"].items() if entry != "\u0104"}  # byte 4
    tokenizer = make(table, model={**table["model"], "vocab": vocabulary})
    assert tokenizer.documents.engine == "tokenizers"


def test_words_and_pieces_are_left_to_the_library(table: dict[str, Any]) -> None:
    for model in (
        {"type": "WordLevel", "vocab": {END_OF_TEXT: 0, "a": 1}, "unk_token": "a"},
        {"type": "Unigram", "vocab": [[END_OF_TEXT, 0.0], ["a", -1.0]], "unk_id": 0, "byte_fallback": False},
    ):
        assert make(table, model=model, pre_tokenizer=None).documents.engine == "tokenizers"


def test_without_the_package_the_library_does_it(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = Tokenizer.load(tokenizer_file).documents.encode(["the cut", "", "every rank \u2602"])
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = Tokenizer.load(tokenizer_file)
    assert tokenizer.documents.engine == "tokenizers"
    assert tokenizer.documents.encode(["the cut", "", "every rank \u2602"])[0].tolist() == expected.tolist()


def test_an_encoder_that_errs_in_one_sample_is_not_taken(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FastEncoder.encode
    monkeypatch.setattr(FastEncoder, "encode", lambda self, text: honest(self, text.replace("\u0130", "I")))
    assert Tokenizer.load(tokenizer_file).documents.engine == "tokenizers"


def test_memory_of_words_has_a_bound(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_encoder, "MAX_KEPT_CHARACTERS", 1000)
    tokenizer = Tokenizer.load(tokenizer_file)
    fast = tokenizer.documents._fast
    assert fast is not None
    kept = []
    for number in range(30):
        tokens, _ = tokenizer.documents.encode([f"the cut model {number} " * 20])
        assert tokens.tolist() == encoded_by_the_library(tokenizer, [f"the cut model {number} " * 20])
        kept.append(fast._inner)
    assert 5 < len(set(map(id, kept))) < 15


def test_no_thread_is_started(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_file)
    assert tokenizer.documents.engine == "gigatoken"
    process = psutil.Process()
    before = process.num_threads()
    tokenizer.documents.encode(["every rank meets others at two points. " * 10_000] * 4)
    assert process.num_threads() == before


@pytest.mark.slow
def test_every_kind_of_character_with_gpt2s_tokenizer(shared: Path) -> None:
    tokenizer = Tokenizer.load(shared / "data" / "gpt2-bpe" / "tokenizer.json")
    assert tokenizer.documents.engine == "gigatoken"
    assigned = [one for one in map(chr, range(0x110000)) if unicodedata.category(one) not in ("Cn", "Co", "Cs")]
    ideographs = [one for one in assigned if unicodedata.name(one, "").startswith(("CJK ", "HANGUL SYLL", "TANGUT "))]
    characters = sorted({*assigned} - {*ideographs} | {*ideographs[::50]})
    chosen = random.Random(0)
    beside = [f"a{one}1{one}{one} {one}b '{one}" for one in characters]
    lines = ["".join(beside[at : at + 64]) for at in range(0, len(beside), 64)]
    mixed = ["".join(chosen.choices(characters[:0x3100], k=200)) for _ in range(500)]
    spaces = ["".join(chosen.choices(" \t\n\r\u00a0\u3000a1.'s", k=50)) for _ in range(1000)]
    texts = [*lines, *mixed, *spaces]
    tokens, lengths = tokenizer.documents.encode(texts)
    for text, ids in zip(texts, np.split(tokens, lengths.cumsum()[:-1]), strict=True):
        assert ids[:-1].tolist() == tokenizer.encode(text), text
