"""A small real corpus, prepared once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import RunConfig, load_run
from crosscut.config.conventions import TOKENS_FOLDER
from crosscut.data import prepare, read_documents


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first addresses of the built-in corpus, 400 KB."""
    path = tmp_path_factory.mktemp("text") / "addresses.txt"
    pieces: list[str] = []
    for document in read_documents(["builtin:state-of-the-union"], text_key="text"):
        pieces.append(document.text)
        if sum(map(len, pieces)) > 400_000:
            break
    path.write_text("\n\n".join(pieces), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokens_folder(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the token shards of `text_file`."""
    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    config = tiny_run(folder, Path("unused"), f"data.text={text_file}").data
    prepare(config, folder, seed=1, progress=False)
    return folder


def tiny_run(tokens: Path, folder: Path, *overrides: str) -> RunConfig:
    """A run of a few steps of a tiny model."""
    table = {
        "model": {"preset": "laptop-tiny", "vocab_size": 500, "dropout": 0.1},
        "data": {"tokens": str(tokens), "vocab_size": 500},
        "training": {
            "steps": 6,
            "batch_size": 4,
            "sequence_length": 32,
            "seed": 1,
            "validate_every": 3,
            "validation_sequences": 8,
        },
        "checkpoint": {"every": 3},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        "output": {"folder": str(folder), "sample_tokens": 5},
    }
    return load_run(table, overrides)


@pytest.fixture(scope="module")
def once() -> Callable[[object, Callable[[], Any]], Any]:
    """Function that computes the value of a key once in a module of tests."""
    found: dict[object, Any] = {}

    def value(key: object, compute: Callable[[], Any]) -> Any:
        if key not in found:
            found[key] = compute()
        return found[key]

    return value


@pytest.fixture
def run_with(tokens_folder: Path, tmp_path: Path):
    """Function that makes a tiny run on the small corpus, with overrides."""

    def make(*overrides: str) -> RunConfig:
        return tiny_run(tokens_folder, tmp_path / "run", *overrides)

    return make


@pytest.fixture(scope="session")
def second_folder(text_file: Path, tokens_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a part of the small corpus, made with the tokenizer of the whole corpus."""
    folder = tmp_path_factory.mktemp("second") / TOKENS_FOLDER
    part = folder.parent / "part.txt"
    part.write_text(text_file.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    tokenizer = f"data.tokenizer={tokens_folder / 'tokenizer.json'}"
    config = tiny_run(folder, Path("unused"), f"data.text={part}", tokenizer, "data.num_shards=1").data
    prepare(config, folder, seed=1, progress=False)
    return folder


@pytest.fixture
def mixed_run(tokens_folder: Path, second_folder: Path, tmp_path: Path):
    """Function that makes a tiny run on both token folders, with `training.document_mask` and with overrides."""

    def make(*overrides: str, weights: tuple[float, float] = (1, 3)) -> RunConfig:
        folders = zip((tokens_folder, second_folder), weights, strict=True)
        items = ", ".join(f'{{folder="{folder}", weight={weight}}}' for folder, weight in folders)
        mixture = ("data.tokens=", f"data.mixture=[{items}]")
        return tiny_run(tokens_folder, tmp_path / "run", *mixture, "training.document_mask=true", *overrides)

    return make
