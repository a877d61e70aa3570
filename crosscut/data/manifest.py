"""Manifest of a token folder: `manifest.json`.

The manifest is written last and lists the length and hash of every file. A folder whose files match its manifest is
therefore complete. The manifest also records the text and the settings from which the tokens were made, so that a
change of the text or the settings is detected. docs/data.md describes the format.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from crosscut.config.data import DataConfig, Objective
from crosscut.config.errors import DamagedDataError, DataError
from crosscut.config.published.folders import MODEL_FILE
from crosscut.config.system.files import read_json, require_regular
from crosscut.data.text.sentences import sentence_rules
from crosscut.data.text.sources import unreadable
from crosscut.data.tokenization.inner import require_tokenizer
from crosscut.data.tokenization.wordpiece import digest_of_given

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
FORMAT = "crosscut-tokens"
VERSION = 1

DTYPES = ("uint16", "uint32")

_Entry = TypeVar("_Entry", "Settings", "SourceEntry", "ShardEntry")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that affect the tokens, apart from the text."""

    seed: int
    """Seed of the random split into training and validation documents."""

    text_key: str
    """Key (jsonl) or column (parquet) of the text."""

    num_shards: int
    """Number of training shards."""

    train_to_validation: int
    """Number of training documents per validation document."""

    trained_vocab_size: int
    """Requested vocabulary size of a tokenizer that was trained on the text. 0 if the tokenizer was given."""

    given_tokenizer: str
    """SHA-256 of the given tokenizer's file. Empty if the tokenizer was trained."""

    objective: str = Objective.CAUSAL.value
    """`data.objective` for which the tokens were made: `causal` or `masked`."""

    sentences: str = ""
    """Name of the rules that found the sentences (`sentence_rules`). Empty if there is no index of sentences, or if
    the tokens belong to a corpus."""

    @classmethod
    def of(cls, config: DataConfig, seed: int) -> Self:
        """Return the settings of a run. Raises `DataError` if the run's tokenizer file cannot be read."""
        given = ""
        if config.tokenizer:
            if Path(config.tokenizer).with_name(MODEL_FILE).is_file():  # the folder of a published model
                require_tokenizer(Path(config.tokenizer))
            try:
                given = digest_of_given(Path(config.tokenizer))
            except OSError as error:
                raise unreadable(config.tokenizer, error) from None
        return cls(
            seed=seed,
            text_key=config.text_key,
            num_shards=config.num_shards,
            train_to_validation=config.train_to_validation,
            trained_vocab_size=0 if given else config.vocab_size,
            given_tokenizer=given,
            objective=config.objective.value,
            sentences=sentence_rules() if config.has_sentences else "",
        )


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """A file from which the tokens were made. If the tokens were made from a corpus of several sources, only the name
    is recorded, because the corpus stages check the files.
    """

    name: str
    """Name of the file in `data.text`. For a corpus of several sources: the name of the source, followed by the name of
    the file.
    """

    bytes: int = 0
    """Size in bytes on disk."""

    modified: int = 0
    """Time of the last change, in nanoseconds since the epoch."""

    sha256: str = ""
    """SHA-256 of the file on disk."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """Description of one shard, which consists of the files `name.tokens` and `name.index` and, for masked language
    modelling, `name.sentences`.
    """

    name: str
    """`train-0`, `train-1`, ... or `validation`."""

    tokens: int
    """Number of token ids, including end-of-text ids."""

    documents: int
    """Number of documents, which is also the number of rows in the index."""

    tokens_sha256: str
    """SHA-256 of `name.tokens`."""

    index_sha256: str
    """SHA-256 of `name.index`."""

    sentences: int = 0
    """Number of sentences, which is also the number of elements of `name.sentences`."""

    sentences_sha256: str = ""
    """SHA-256 of `name.sentences`. Empty if the shard has no index of sentences."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a token folder."""

    dtype: str
    """Type of a token id: `uint16` or `uint32`, little-endian."""

    vocab_size: int
    """Largest allowed id + 1."""

    end_of_text: int
    """Id at the end of every document."""

    tokenizer_sha256: str
    """SHA-256 of `tokenizer.json`."""

    settings: Settings
    """Settings that affect the tokens, apart from the text."""

    sources: tuple[SourceEntry, ...]
    """Files of the text, in the order in which they were read."""

    train: tuple[ShardEntry, ...]
    """Training shards."""

    validation: ShardEntry
    """Validation shard."""

    corpus: Mapping[str, float] = field(default_factory=dict)
    """Weight of each source, keyed by name, if the tokens were made from a corpus of several sources. Empty if the
    tokens were made from plain text.
    """

    def write(self, folder: Path) -> None:
        """Write the manifest to `manifest.json` in `folder`."""
        table = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        (folder / MANIFEST_NAME).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest from `manifest.json` in `folder`.

        Raises `DataError` if the file is missing or is a manifest of another version, and `DamagedDataError` if the
        file is not valid JSON, lacks a field or contradicts itself: the vocabulary is too large for the type of the
        ids, or the end-of-text id is outside the vocabulary.
        """
        table = _read_json(folder)
        if table.get("format") != FORMAT or table.get("version") != VERSION:
            raise DataError(
                f"`{folder / MANIFEST_NAME}` must have format {FORMAT!r}, version {VERSION}, but has "
                f"{table.get('format')!r}, version {table.get('version')!r}. Prepare the tokens again."
            )
        try:
            manifest = cls(
                dtype=str(table["dtype"]),
                vocab_size=int(table["vocab_size"]),
                end_of_text=int(table["end_of_text"]),
                tokenizer_sha256=str(table["tokenizer_sha256"]),
                settings=_typed(Settings, table["settings"]),
                sources=tuple(_typed(SourceEntry, entry) for entry in table["sources"]),
                train=tuple(_typed(ShardEntry, entry) for entry in table["train"]),
                validation=_typed(ShardEntry, table["validation"]),
                corpus=dict(table["corpus"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DamagedDataError(
                f"`{folder / MANIFEST_NAME}` must have the fields of version {VERSION}, but does not: {error}. "
                f"Prepare the tokens again."
            ) from None
        manifest._check(folder)
        return manifest

    def _check(self, folder: Path) -> None:
        path = folder / MANIFEST_NAME
        if self.dtype not in DTYPES:
            raise DamagedDataError(
                f"`dtype` in `{path}` must be 'uint16' or 'uint32', but is {self.dtype!r}. Prepare the tokens again."
            )
        room = int(np.iinfo(self.dtype).max) + 1
        if self.vocab_size > room:
            raise DamagedDataError(
                f"`vocab_size` in `{path}` must be at most {room:,}, the limit of {self.dtype}, but is "
                f"{self.vocab_size:,}. Prepare the tokens again."
            )
        if not 0 <= self.end_of_text < self.vocab_size:
            raise DamagedDataError(
                f"`end_of_text` in `{path}` must be an id of the vocabulary, 0 to {self.vocab_size - 1}, but is "
                f"{self.end_of_text}. Prepare the tokens again."
            )

    @property
    def token_dtype(self) -> np.dtype[np.uint16 | np.uint32]:
        """Type of a token id on disk."""
        return np.dtype("<u2" if self.dtype == "uint16" else "<u4")


def _typed(kind: type[_Entry], table: Mapping[str, Any]) -> _Entry:
    """Make an entry of the manifest from its JSON object. Raises `TypeError` or `ValueError` if a value does not have
    the type of its field, is negative, or contains a NUL character, or if the name of a shard contains a folder.
    """
    entry = kind(**table)
    for name in table:
        value, wanted = getattr(entry, name), kind.__annotations__[name]
        if type(value) is not wanted:
            raise TypeError(f"`{name}` must be of type {wanted.__name__}, but is {value!r:.60}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"`{name}` must be at least 0, but is {value}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"`{name}` must not contain a NUL character, but is {value!r:.60}")
    if isinstance(entry, ShardEntry) and not re.fullmatch(r"\w[\w.-]*", entry.name):
        raise ValueError(f"the `name` of a shard must be a file's name without its folder, but is {entry.name!r:.60}")
    return entry


def _read_json(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST_NAME
    try:
        require_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"`{folder}` must be a folder of token shards, but has no {MANIFEST_NAME}. "
            f"Make the folder with `crosscut prepare`."
        ) from None
    except OSError as error:
        raise unreadable(str(path), error) from None
    return read_json(path, DataError, invalid=DamagedDataError, remedy="Prepare the tokens again.")
