"""A tokenizer whose ids can be counted by hand, and where real files are."""

import os
from pathlib import Path

import pytest

from crosscut.data import Tokenizer


class Letters:
    """A token a byte: its value + 1; 0 ends a text."""

    vocab_size = 257
    end_of_text = 0

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode("utf-8")]


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Published files that are not the project's to ship, in a folder that `CROSSCUT_SHARED` names."""
    if "CROSSCUT_SHARED" not in os.environ:
        pytest.skip("CROSSCUT_SHARED names no folder with published files")
    return Path(os.environ["CROSSCUT_SHARED"])


@pytest.fixture(scope="session")
def gpt2(shared: Path) -> Tokenizer:
    """GPT-2's own tokenizer."""
    return Tokenizer.load(shared / "data" / "gpt2-bpe" / "tokenizer.json")
