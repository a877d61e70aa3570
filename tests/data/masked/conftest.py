"""Tokens of real text for masked language modelling: speeches from the corpus that comes with Crosscut."""

import json

import pytest

from crosscut.config import DataConfig
from crosscut.data import TokenFolder, prepare
from crosscut.data.text.documents import read_documents

CHARACTERS = 600_000


@pytest.fixture(scope="session")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """A token folder of about 130,000 tokens, with a trained WordPiece. Each document is a part of a speech."""
    folder = tmp_path_factory.mktemp("speeches")
    size = 0
    with (folder / "speeches.jsonl").open("w") as file:
        for document in read_documents(["builtin:state-of-the-union"], text_key="text"):
            file.write(json.dumps({"text": document.text[:5000]}) + "\n")
            size += 5000
            if size > CHARACTERS:
                break
    config = DataConfig(
        text=(str(folder / "speeches.jsonl"),), vocab_size=2000, objective="masked", num_shards=2, train_to_validation=9
    )
    tokens = prepare(config, folder / "tokens", seed=7, workers=1, progress=False)
    assert isinstance(tokens, TokenFolder)
    return tokens


@pytest.fixture(scope="session")
def config() -> DataConfig:
    """Masking as in the paper's BERT."""
    return DataConfig(objective="masked")
