"""A tokenizer whose ids can be counted by hand, and the folder of published files."""

from pathlib import Path

import pytest
import torch

from crosscut.config import Layout, ModelConfig
from crosscut.data import Tokenizer
from crosscut.model import GPT, initialize
from crosscut.parallel import RandomStreams, make_mesh, shard_model


class Letters:
    """Tokenizer with one token per byte. The id is the value of the byte plus 1, and the id 0 ends a text."""

    vocab_size = 257
    end_of_text = 0

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode("utf-8")]


def make_model(config: ModelConfig, layout: Layout) -> GPT:
    """On a rank: a model with weights that are the same on every layout."""
    mesh = make_mesh(layout, torch.device("cpu"))
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=torch.float64)
    shard_model(model, mesh, units=model.blocks, always_used=True)
    initialize(model, 1)
    return model


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture(scope="session")
def gpt2(shared: Path) -> Tokenizer:
    """GPT-2's own tokenizer."""
    return Tokenizer.load(shared / "data" / "gpt2-bpe" / "tokenizer.json")
