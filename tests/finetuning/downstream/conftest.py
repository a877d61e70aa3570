"""Tiny models with tokenizers, and the files of small tasks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.data import Tokenizer
from crosscut.data.tokenization.wordpiece import train_wordpiece
from crosscut.logbook.contents import read_metrics
from tests.finetuning.encoding.conftest import TEXT

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 48, "vocab_size": 200,
}  # fmt: skip
PLAIN = (
    "training.device=cpu",
    "training.batch_size=8",
    "training.compare_replicas_every=1",
    "optimizer.learning_rate=0.003",
)
EXACT = (*PLAIN, "training.precision=float64", "model.dropout=0")


def finetune(*arguments: object) -> Any:
    """Call `crosscut finetune` in this process. Raises what the command raises."""
    result = CliRunner().invoke(commands, ["finetune", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows_of(folder: Path, key: str) -> list[float]:
    """Values of a figure of a run, by step."""
    rows = read_metrics(folder)
    return [row[key] for row in rows if key in row]


def sentences(number: int, *, first: int = 0) -> list[tuple[str, str, str]]:
    """Pairs of texts, labelled by whether the first one is about a fox."""
    animals = ("quick brown fox", "lazy dog")
    tails = ("jumps over the dog", "sleeps", "does not sleep in France", "gave their name to Normandy")
    return [
        (f"the {animals[i % 2]} {tails[i % 4 // 2]}", f"{tails[i % 3]} {i % 7}", ("fox", "dog")[i % 2])
        for i in range(first, first + number)
    ]


def write_table(path: Path, rows: list[tuple[str, str, str]], *, label: str = "kind") -> Path:
    lines = [f"text\tother\t{label}", *("\t".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Options that name the files of a task with two labels."""
    folder = tmp_path_factory.mktemp("tables")
    for name, number, first in (("train", 44, 0), ("dev", 14, 100), ("test", 10, 200)):
        write_table(folder / f"{name}.tsv", sentences(number, first=first))
    return ("--data", folder, "--text", "text", "--pair", "other", "--label", "kind")


@pytest.fixture(scope="session")
def make_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a tiny BERT of `transformers` with a WordPiece. The argument is the name of its class."""

    def make(kind: str = "BertModel", **more: Any) -> Path:
        import transformers

        folder = tmp_path_factory.mktemp("bert") / "tiny-bert"
        torch.manual_seed(1)
        getattr(transformers, kind)(transformers.BertConfig(**{**SIZES, **more})).save_pretrained(folder)
        train_wordpiece([TEXT] * 3, vocab_size=200).save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="session")
def bert(make_bert: Callable[..., Path]) -> Path:
    return make_bert()


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a byte-pair tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2") / "tiny-gpt2"
    torch.manual_seed(1)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=320, **ids)
    GPT2LMHeadModel(config).save_pretrained(folder)
    Tokenizer.train([TEXT] * 3, vocab_size=320).save(folder / "tokenizer.json")
    return folder
