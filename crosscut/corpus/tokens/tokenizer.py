"""The tokenizer of a corpus: a copy of a given tokenizer, or a tokenizer trained on the cleaned documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from crosscut.config.corpora import TokensConfig
from crosscut.config.published.folders import TOKENIZER_CONFIG_FILE
from crosscut.corpus.batches import batches
from crosscut.corpus.documents import Part
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.data.tokenization.encoding import BATCH_CHARACTERS
from crosscut.data.tokenization.tokenizer import MAX_TRAINING_CHARACTERS, Tokenizer

FILE = "tokenizer.json"
"""Name of the tokenizer's file in the folder of the stage."""


def make_tokenizer(parts: Sequence[Part], config: TokensConfig, output: Output) -> Counts:
    """Run the task: copy the tokenizer that `tokens.tokenizer` names, or train a tokenizer on the first documents.

    If the tokenizer is copied, a file `tokenizer_config.json` with the end-of-text token is written too, because the
    given tokenizer may define this token in another file. Raises `DataError` if the given file is not a tokenizer, or
    if the tokenizer has no end-of-text token.
    """
    path = output.path(FILE)
    if config.tokenizer:
        tokenizer = check_tokenizer(config)
        tokenizer.copy_given(Path(config.tokenizer), path)
        output.path(TOKENIZER_CONFIG_FILE).write_text(json.dumps(tokenizer.settings()), encoding="utf-8")
        return {"vocab_size": tokenizer.vocab_size, "trained_on": {"documents": 0, "characters": 0}}
    read = {"documents": 0, "characters": 0}
    tokenizer = Tokenizer.train(_texts(parts, read), vocab_size=config.vocab_size, objective=config.objective)
    tokenizer.save(path)
    return {"vocab_size": tokenizer.vocab_size, "trained_on": read}


def _texts(parts: Sequence[Part], read: dict[str, int]) -> Iterator[str]:
    for part in parts:
        for document in part.documents():
            read["documents"] += 1
            read["characters"] += min(len(document.text), MAX_TRAINING_CHARACTERS - read["characters"])
            yield document.text


def check_tokenizer(config: TokensConfig) -> Tokenizer:
    """Load the tokenizer that `tokens.tokenizer` names. Raises `DataError` if the tokenizer cannot be used."""
    return Tokenizer.load(Path(config.tokenizer), setting="tokens.tokenizer", objective=config.objective)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer at `path`. A process caches the last tokenizer until its file changes."""
    status = path.stat()
    return _kept(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _kept(path: Path, modified: int, size: int) -> Tokenizer:  # noqa: ARG001 - time and size are part of the cache key
    return Tokenizer.load(path)


def count_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Count the tokens of each text without the end-of-text token. Texts are encoded in batches, to bound memory."""
    lengths: list[int] = []
    for batch in batches(texts, len, BATCH_CHARACTERS):
        lengths += (tokenizer.documents.encode(batch)[1] - 1).tolist()
    return lengths
