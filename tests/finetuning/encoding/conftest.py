"""Tokenizers of tiny models, with the special tokens of an encoder and without any."""

from pathlib import Path

import pytest

from crosscut.config import ModelConfig
from crosscut.data import Tokenizer
from crosscut.data.tokenization.decoder_rows import Special
from crosscut.data.tokenization.wordpiece import train_wordpiece
from crosscut.finetuning.encoding.tokens import TextEncoder

TEXT = (
    "The Normans gave their name to Normandy, a region in France. The quick brown fox jumps over the lazy dog. "
    "In what country is Normandy? Who gave their name to it in the 1000's? A dog sleeps; the fox does not."
)
SIZES = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 400, "max_sequence_length": 512}


def model_of(*, is_causal: bool, **sizes: int) -> ModelConfig:
    attention = "causal" if is_causal else "bidirectional"
    return ModelConfig(**{**SIZES, **sizes}, attention=attention)


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wordpiece") / "tokenizer.json"
    train_wordpiece([TEXT] * 3, vocab_size=200).save(str(path))
    return path


@pytest.fixture(scope="session")
def bytes_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    Tokenizer.train([TEXT] * 3, vocab_size=320).save(path)
    return path


def encoder_of(path: Path, *, is_causal: bool = False, length: int = 32, begin: int | None = None) -> TextEncoder:
    return TextEncoder(path, model_of(is_causal=is_causal), Special(begin, 0), length=length)
