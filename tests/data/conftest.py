"""Small corpora, a tokenizer trained on one, and shards made by hand."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from crosscut.data import Shard, Tokenizer
from crosscut.data.shards.megatron import write_index
from crosscut.data.shards.writing import INDEX_DTYPE
from crosscut.data.tokenization import encoding
from tests.workers import fork_workers

WORDS = ("the", "cut", "model", "is", "one", "whole", "and", "every", "rank", "meets", "others", "at", "two", "points")


def make_texts(count: int, *, seed: int = 0) -> list[str]:
    """Texts of 5 to 80 words."""
    random = np.random.default_rng(seed)
    return [f"Text {number}: {' '.join(random.choice(WORDS, random.integers(5, 80)))}." for number in range(count)]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 entries."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(make_texts(100), vocab_size=300).save(path)
    return path


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch, encoding)


@pytest.fixture
def texts() -> list[str]:
    """Ninety short texts."""
    return make_texts(90, seed=1)


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """The ninety texts as a jsonl file."""
    return write_jsonl(tmp_path / "corpus.jsonl", texts)


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def make_shard() -> Callable[..., Shard]:
    """Function that makes a shard of documents with the given lengths. The tokens count up from `first`."""

    def make(lengths: Sequence[int], *, first: int = 0, name: str = "train-0") -> Shard:
        index = np.zeros(len(lengths), dtype=INDEX_DTYPE)
        index["end"] = np.cumsum(lengths)
        index["record"] = np.arange(len(lengths)) + 1
        return Shard(name, np.arange(first, first + sum(lengths), dtype=np.uint32), index, ("made.jsonl",))

    return make


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]], dtype: npt.DTypeLike) -> None:
    """Write `prefix.bin` and `prefix.idx` in Megatron-LM's format, with one sequence per document."""
    write_index(Path(f"{prefix}.idx"), np.array([len(document) for document in documents], np.int32), dtype)
    np.concatenate([[], *documents]).astype(dtype).tofile(f"{prefix}.bin")


def write_sentencepiece(path: Path) -> Path:
    """Write a tokenizer like that of Llama 2: spaces are written as blocks, each text begins with a block, and unknown
    characters are encoded as bytes.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "wor", "ld", *"helowrd"]
    merges = [("▁", "h"), ("▁h", "e"), ("▁he", "l"), ("▁hel", "l"), ("▁hell", "o"), ("w", "o"), ("wo", "r"), ("l", "d")]
    pieces += [first + second for first, second in merges if first + second not in pieces]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["</s>"])
    inner.save(str(path))
    return path
