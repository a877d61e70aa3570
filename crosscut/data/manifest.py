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
from typing import Self

import numpy as np

from crosscut.config.data import DataConfig, Objective
from crosscut.config.errors import DamagedDataError, DataError
from crosscut.config.published.folders import MODEL_FILE
from crosscut.config.system.files import read_json, require_regular
from crosscut.config.system.records import Count, from_json
from crosscut.data.text.sentences import sentence_rules
from crosscut.data.text.sources import unreadable
from crosscut.data.tokenization.inner import require_tokenizer
from crosscut.data.tokenization.wordpiece import digest_of_given

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
FORMAT = "crosscut-tokens"
VERSION = 1

DTYPES = ("uint16", "uint32")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that affect the tokens, apart from the text."""

    seed: Count
    """Seed of the random split into training and validation documents."""

    text_key: str
    """Key (jsonl) or column (parquet) of the text."""

    num_shards: Count
    """Number of training shards."""

    train_to_validation: Count
    """Number of training documents per validation document."""

    trained_vocab_size: Count
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

    bytes: Count = 0
    """Size in bytes on disk."""

    modified: Count = 0
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

    tokens: Count
    """Number of token ids, including end-of-text ids."""

    documents: Count
    """Number of documents, which is also the number of rows in the index."""

    tokens_sha256: str
    """SHA-256 of `name.tokens`."""

    index_sha256: str
    """SHA-256 of `name.index`."""

    sentences: Count = 0
    """Number of sentences, which is also the number of elements of `name.sentences`."""

    sentences_sha256: str = ""
    """SHA-256 of `name.sentences`. Empty if the shard has no index of sentences."""


@dataclass(frozen=True, kw_only=True)
class TokenManifest:
    """Description of a token folder."""

    dtype: str
    """Type of a token id: `uint16` or `uint32`, little-endian."""

    vocab_size: Count
    """Largest allowed id + 1."""

    end_of_text: Count
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
            manifest = from_json(cls, table)
            for shard in (*manifest.train, manifest.validation):
                if not re.fullmatch(r"\w[\w.-]*", shard.name):
                    raise ValueError(
                        f"the `name` of a shard must be a file's name without its folder, but is {shard.name!r:.60}"
                    )
        except ValueError as error:
            raise DamagedDataError(
                f"`{folder / MANIFEST_NAME}` must have the fields of version {VERSION}, but does not: {error}. "
                f"Prepare the tokens again."
            ) from None
        manifest._check(folder)
        return manifest

    def _check(self, folder: Path) -> None:
        path = folder / MANIFEST_NAME
        if self.dtype not in DTYPES:
            fault = f"`dtype` in `{path}` must be 'uint16' or 'uint32', but is {self.dtype!r}"
        elif self.vocab_size > (room := int(np.iinfo(self.dtype).max) + 1):
            most = f"at most {room:,}, the limit of {self.dtype}"
            fault = f"`vocab_size` in `{path}` must be {most}, but is {self.vocab_size:,}"
        elif not 0 <= self.end_of_text < self.vocab_size:
            ids = f"0 to {self.vocab_size - 1}"
            fault = f"`end_of_text` in `{path}` must be an id of the vocabulary, {ids}, but is {self.end_of_text}"
        else:
            return
        raise DamagedDataError(f"{fault}. Prepare the tokens again.")

    @property
    def token_dtype(self) -> np.dtype[np.uint16 | np.uint32]:
        """Type of a token id on disk."""
        return np.dtype("<u2" if self.dtype == "uint16" else "<u4")


def _read_json(folder: Path) -> Mapping[str, object]:
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
