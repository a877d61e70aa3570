"""Texts of any length have the ids of the whole text, in windows whose length bounds the memory."""

import json
from collections.abc import Iterator
from functools import partial
from operator import attrgetter

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from crosscut.config import DataError
from crosscut.config.data import Objective
from crosscut.data import Tokenizer
from crosscut.data.tokenization import long_texts
from crosscut.data.tokenization.long_texts import _cut_long_words, batches, encode_long, pieces_for_training
from tests.data.conftest import make_texts
from tests.refusals import refusal

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PROSE = "\n".join(make_texts(60))
RUNS = [piece * count for piece in ("\n", " ", "a", "=", "中") for count in range(2, 40, 3)]
TRAINING = [PROSE, *RUNS, "\t\n\t\n \n", "a1.b2"]


def trained(model: models.Model, trainer: trainers.Trainer, splitter: object, normalizer: object = None):
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.normalizer = splitter, normalizer
    inner.train_from_iterator(TRAINING, trainer)
    return inner


def byte_level(splitter: object) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, splitter)


def sentencepiece() -> tokenizers.Tokenizer:
    """A BPE to which a whole text is one word, as in Llama 2."""
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[f"<0x{byte:02X}>" for byte in range(256)], show_progress=False
    )
    inner = trained(models.BPE(byte_fallback=True, fuse_unk=True), trainer, pre_tokenizers.Metaspace())
    table = json.loads(inner.to_str()) | {
        "pre_tokenizer": None,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
    }
    return tokenizers.Tokenizer.from_str(json.dumps(table))


def wordpiece() -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(),
                   normalizers.BertNormalizer())  # fmt: skip


def unigram() -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())


SPLIT = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
KINDS = {
    "GPT-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Llama 3": lambda: byte_level(
        pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ),
    "bytes": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)),
    "Llama 2": sentencepiece,
    "WordPiece": wordpiece,
    "Unigram": unigram,
}


def hostile(length: int) -> Iterator[tuple[str, str]]:
    """Texts without a boundary, texts of nothing but boundaries, and prose."""
    for piece in ("\n", " ", "a", "=", "7", "中", "\t\n", "e\u0301", "a\n", ".a", "a ", "'s", "\x00", "\U0001f600"):
        yield repr(piece), piece * (length // len(piece))
    letters = "".join(chr(97 + (number * number // 7 + number * 11) % 26) for number in range(length))
    yield "letters", letters
    yield "digits", "".join(str(ord(letter) % 10) for letter in letters)
    yield "blanks", "".join(" \t\n\r"[ord(letter) % 4] for letter in letters)
    yield "prose", (PROSE * 9)[:length]
    yield "prose without spaces", (PROSE * 9).replace(" ", "")[:length]
    yield "a run between prose", PROSE[:6000] + "\n" * (length // 2) + "a" * (length // 2) + PROSE


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "WINDOW", 1511)
    monkeypatch.setattr(long_texts, "OVERLAP", 256)


@pytest.mark.usefixtures("short_windows")
@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", KINDS)
def test_ids_and_places_are_those_of_the_whole_text(name: str) -> None:
    inner = KINDS[name]()
    for what, text in hostile(9000):
        expected, found = inner.encode(text, add_special_tokens=False), encode_long(inner, text)
        assert found.ids.tolist() == expected.ids, what
        assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == expected.offsets, what


class Watched:
    """Tokenizer that notes the lengths of the texts that it gets."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner, self.model, self.lengths = inner, inner.model, []

    def encode(self, text: str, **options: bool) -> tokenizers.Encoding:
        self.lengths.append(len(text))
        return self.inner.encode(text, **options)


@pytest.mark.usefixtures("short_windows")
def test_texts_reach_the_library_in_windows_and_each_character_about_once() -> None:
    inner = KINDS["GPT-2"]()
    for what, text in hostile(9000):
        watched = Watched(inner)
        encode_long(watched, text)  # type: ignore[arg-type]
        assert max(watched.lengths) == 1511, what
        assert sum(watched.lengths) < 1.6 * len(text), what


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("way", ["encode", "encode_prompt", "documents.encode", "documents.encode_sentences"])
def test_every_way_to_encode_a_text_has_windows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from crosscut.data.tokenization import document_encoder

    made = Tokenizer.train([PROSE], vocab_size=300, objective=Objective.MASKED)  # gigatoken does not encode a WordPiece
    text = "so it goes. " * 500
    expected = made._inner.encode(text, add_special_tokens=False).ids
    encoded = []
    for module in (long_texts, document_encoder):
        monkeypatch.setattr(module, "WINDOW", 1511)
        monkeypatch.setattr(
            module, "encode_long", lambda *arguments: encoded.append(encode_long(*arguments)) or encoded[-1]
        )
    encode = attrgetter(way)(made)
    ids = encode([text])[0][:-1].tolist() if way.startswith("documents") else encode(text)
    assert ids == expected
    assert len(encoded) == 1


@pytest.mark.parametrize("objective", Objective)
def test_pieces_for_training_give_the_tokenizer_of_the_whole_text(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = partial(Tokenizer.train, vocab_size=400, objective=objective)
    text = f"{PROSE}\n{PROSE.upper()}"
    whole = train([text])
    monkeypatch.setattr(long_texts, "WINDOW", 500)
    monkeypatch.setattr(long_texts, "OVERLAP", 100)
    assert len(list(pieces_for_training(text))) > 20
    assert train([text])._inner.to_str() == whole._inner.to_str()


@pytest.mark.parametrize("piece", ["a\n", "a ", "a1", ".a", "\n"])
def test_pieces_for_training_are_bounded_whatever_the_text(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 16 MB with a word in each byte once took more than four gigabytes."""
    monkeypatch.setattr(long_texts, "WINDOW", 5000)
    text = piece * 20_000
    pieces = list(pieces_for_training(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 5000


def test_only_words_of_more_than_a_thousand_characters_are_cut_for_training():
    text = "a sentence with 1,000 words, " * 500 + "a" * 990 + " " + "!" * 990 + "e\u0301" * 300
    assert list(_cut_long_words(text)) == [text]
    long = "so " + "a" * 5000 + "\n" * 3000 + "the end"
    pieces = list(_cut_long_words(long))
    assert "".join(pieces) == long
    assert max(len(word) for piece in pieces for word in piece.split()) < 2000


def test_texts_that_are_encoded_as_a_whole_come_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "MOST_AT_ONCE", 10)
    pairs = [("abcdef", None), ("abcd", "ef"), ("a", "b"), ("c", None)]
    assert list(batches(pairs, "Example")) == [pairs[:2], pairs[2:]]
    assert refusal(DataError, list, batches(["short", "a" * 11], "Text")) == (
        "Text 2 must have at most 10 characters, because it is encoded as a whole, but has 11. Shorten the text."
    )


@pytest.mark.usefixtures("short_windows")
def test_windows_of_a_unigram_model_are_joined_only_where_a_word_starts() -> None:
    """In 16 MB of one letter, windows that agreed still had a remainder each: 45 tokens too many."""
    inner = unigram()
    for piece in ("中", "a"):
        assert len(list(long_texts._joined(inner, piece * 9001))) == 1
    assert len(list(long_texts._joined(inner, PROSE * 3))) > 3
