"""A tokenizer whose ids can be counted by hand, and the folder of published files."""

import os
from pathlib import Path

import pytest

from crosscut.data import Tokenizer


class Letters:
    """Tokenizer with one token per byte. The id is the value of the byte plus 1, and the id 0 ends a text."""

    vocab_size = 257
    end_of_text = 0

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode("utf-8")]


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with published files that the project may not ship. The environment variable `CROSSCUT_SHARED` names the
    folder. Without it, the test is skipped.
    """
    if "CROSSCUT_SHARED" not in os.environ:
        pytest.skip("CROSSCUT_SHARED names no folder with published files")
    return Path(os.environ["CROSSCUT_SHARED"])


@pytest.fixture(scope="session")
def gpt2(shared: Path) -> Tokenizer:
    """GPT-2's own tokenizer."""
    return Tokenizer.load(shared / "data" / "gpt2-bpe" / "tokenizer.json")
