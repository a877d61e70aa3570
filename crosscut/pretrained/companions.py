"""Files that are needed to prompt a published model: tokenizer, end-of-text ids and chat template.

A run that starts from a published model keeps a copy of these files. The run can therefore generate text, be evaluated
and be exported even if the model's folder is moved.
"""

import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from crosscut.config import RunConfig
from crosscut.config.conventions import INITIAL_FOLDER
from crosscut.config.published.folders import (
    GENERATION_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    read_published,
)
from crosscut.data import Tokenizer
from crosscut.data.hashing import sha256
from crosscut.data.manifest import MANIFEST_NAME
from crosscut.data.tokenization.inner import read_inner

COMPANIONS = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, "chat_template.jinja", GENERATION_FILE)
"""Names of the optional files that belong to a tokenizer and are stored in the tokenizer's folder."""


def keep_companions(published: Path, folder: Path) -> None:
    """Copy the config, the tokenizer and the tokenizer's optional files (`COMPANIONS`) of a published model to
    `folder`. An existing `folder` is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (MODEL_FILE, TOKENIZER_FILE, *COMPANIONS):
        if (published / name).is_file():
            shutil.copyfile(published / name, folder / name)


class Speech(NamedTuple):
    """Tokenizer and special token ids for prompting a model."""

    tokenizer: Path
    """Path of the `tokenizer.json`. The chat template, if any, is in the same folder."""
    end_of_text: int
    stops: tuple[int, ...]
    """Additional token ids that end the generated text."""
    begin_of_text: int | None
    """Token id that the tokenizer's template puts at the start of a text. None if the template starts a text with no
    special token, or with a token that also ends a text.
    """


def speech(tokenizer: Path, models: Iterable[Path]) -> Speech:
    """Find the special token ids for a tokenizer. Ids of a model come from the first folder in `models` that has the
    same tokenizer.

    If the tokenizer is in a folder of token shards, the shards' manifest gives the end-of-text id. If the model's
    folder gives a different end-of-text id, that id becomes an additional stop. Raises `DataError` for a tokenizer that
    cannot be read, and `ConfigError` for a model that Crosscut does not support.
    """
    model = next((folder for folder in models if _is_same_file(folder / TOKENIZER_FILE, tokenizer)), None)
    kept = tokenizer if model is None else model / TOKENIZER_FILE
    tokens_say = tokenizer.with_name(MANIFEST_NAME).is_file()
    told = dict.fromkeys((tokenizer if tokens_say else kept, kept))
    stops = () if model is None else read_published(model).stops
    end, *others = dict.fromkeys((*(Tokenizer.load(file).end_of_text for file in told), *stops))
    return Speech(kept, end, tuple(others), _begin(kept, {end, *others}))


def begin_of_run(run: RunConfig, tokens: Path) -> int | None:
    """Token id that precedes every prompt of a run's model, as in the published model from which the run starts.
    `tokens` is the folder of the run's token shards. None if the run starts from random weights or the published model
    uses no such id.
    """
    if not run.training.initialize_from:
        return None
    models = (Path(run.output.folder) / INITIAL_FOLDER, Path(run.training.initialize_from))
    return speech(tokens / TOKENIZER_FILE, models).begin_of_text


def _begin(tokenizer: Path, ends: Container[int]) -> int | None:
    ids = read_inner(tokenizer).encode("").ids
    return ids[0] if ids and ids[0] not in ends else None


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether the files have the same content. Files of different sizes, and one file under two names, are not read."""
    if not one.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    return one.samefile(other) or sha256(one) == sha256(other)
