"""The run's tokenizer: a given one, or one trained on the cleaned documents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from crosscut.config.corpus import TokensConfig
from crosscut.config.published import TOKENIZER_CONFIG_FILE
from crosscut.corpus.documents import Part
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.data.encoding import BATCH_CHARACTERS
from crosscut.data.tokenizer import MAX_TRAINING_CHARACTERS, Tokenizer

FILE = "tokenizer.json"
"""Name of the tokenizer in the stage's folder."""


def make_tokenizer(parts: Sequence[Part], config: TokensConfig, output: Output) -> Counts:
    """Task: copy the tokenizer that `tokens.tokenizer` names, or train one on the first documents of the parts.

    Beside a copy lies what says how a text ends, as that may be said elsewhere beside the given one.

    Raises `DataError` where the given one is no tokenizer, or has no token that ends a text.
    """
    path = output.path(FILE)
    if config.tokenizer:
        tokenizer = check_tokenizer(config)
        shutil.copyfile(config.tokenizer, path)
        output.path(TOKENIZER_CONFIG_FILE).write_text(json.dumps(tokenizer.settings()), encoding="utf-8")
        return {"vocab_size": tokenizer.vocab_size, "trained_on": {"documents": 0, "characters": 0}}
    read = {"documents": 0, "characters": 0}
    tokenizer = Tokenizer.train(_texts(parts, read), vocab_size=config.vocab_size)
    try:
        tokenizer.save(path)
    except Exception as error:  # the library raises bare Exception where the disk does not take it
        raise OSError(str(error)) from None
    return {"vocab_size": tokenizer.vocab_size, "trained_on": read}


def _texts(parts: Sequence[Part], read: dict[str, int]) -> Iterator[str]:
    for part in parts:
        for document in part.documents():
            read["documents"] += 1
            read["characters"] += min(len(document.text), MAX_TRAINING_CHARACTERS - read["characters"])
            yield document.text


def check_tokenizer(config: TokensConfig) -> Tokenizer:
    """The tokenizer that `tokens.tokenizer` names. Raises `DataError` where it cannot be used."""
    return Tokenizer.load(Path(config.tokenizer), setting="tokens.tokenizer")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer at `path`, which a process keeps until the file is another or it needs one of another file."""
    status = path.stat()
    return _kept(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _kept(path: Path, modified: int, size: int) -> Tokenizer:  # noqa: ARG001 - what a file is known by
    return Tokenizer.load(path)


def count_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Tokens of each text without the end of text, encoded some at a time, so that memory has a bound."""
    cuts = [0]
    size = 0
    for number, text in enumerate(texts, start=1):
        size += len(text)
        if size >= BATCH_CHARACTERS or number == len(texts):
            cuts.append(number)
            size = 0
    lengths: list[int] = []
    for start, stop in pairwise(cuts):
        lengths += (tokenizer.encode_documents(texts[start:stop])[1] - 1).tolist()
    return lengths
