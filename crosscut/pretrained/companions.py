"""What lies beside a published model's weights and says how to speak to it: its tokenizer, ends of text, chat template.

A run that starts from such a model keeps a copy, so that it can be asked, scored and exported wherever it is moved.
"""

import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from crosscut.config import RunConfig
from crosscut.config.conventions import INITIAL_FOLDER
from crosscut.config.published import GENERATION_FILE, MODEL_FILE, TOKENIZER_FILE, read_published
from crosscut.data import Tokenizer
from crosscut.data.hashing import sha256

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
COMPANIONS = (TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja", GENERATION_FILE)
"""What may lie beside a tokenizer and belongs to it."""


def keep_companions(published: Path, folder: Path) -> None:
    """Copy a published model's folder, but for its weights, to `folder`, in the place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (MODEL_FILE, TOKENIZER_FILE, *COMPANIONS):
        if (published / name).is_file():
            shutil.copyfile(published / name, folder / name)


class Speech(NamedTuple):
    """How to speak to a model."""

    tokenizer: Path
    """Its `tokenizer.json`. A chat template lies beside it where there is one."""
    end_of_text: int
    stops: tuple[int, ...]
    """Further ids that end what the model writes."""
    begin_of_text: int | None
    """What the tokenizer's own template puts before a text; None where that is nothing, or an end of text."""


def speech(tokenizer: Path, models: Iterable[Path]) -> Speech:
    """What a tokenizer says, and beside it the first of the models' folders that has the same one.

    Raises `DataError` for a tokenizer that cannot be read, and `ConfigError` for a model that is not known.
    """
    model = next((folder for folder in models if _is_same_file(folder / TOKENIZER_FILE, tokenizer)), None)
    stops: tuple[int, ...] = ()
    if model is not None:
        tokenizer, stops = model / TOKENIZER_FILE, read_published(model).stops
    end = Tokenizer.load(tokenizer).end_of_text
    return Speech(tokenizer, end, tuple(stop for stop in stops if stop != end), _begin(tokenizer, {end, *stops}))


def begin_of_run(run: RunConfig, tokens: Path) -> int | None:
    """What comes before a text that the model of a run is asked of: as in the published model that it starts from."""
    if not run.training.initialize_from:
        return None
    models = (Path(run.output.folder) / INITIAL_FOLDER, Path(run.training.initialize_from))
    return speech(tokens / TOKENIZER_FILE, models).begin_of_text


def _begin(tokenizer: Path, ends: Container[int]) -> int | None:
    import tokenizers

    ids = tokenizers.Tokenizer.from_file(str(tokenizer)).encode("").ids
    return ids[0] if ids and ids[0] not in ends else None


def _is_same_file(one: Path, other: Path) -> bool:
    return one.is_file() and sha256(one) == sha256(other)
