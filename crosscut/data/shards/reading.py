"""Read a token folder as shards, which are checked against the manifest when they are opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DamagedDataError
from crosscut.data.hashing import sha256_of_all
from crosscut.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, ShardEntry, TokenManifest
from crosscut.data.shards.array_file import ArrayFile
from crosscut.data.shards.writing import INDEX_DTYPE, SENTENCE_DTYPE
from crosscut.data.tokenization.encoding import Tokens
from crosscut.data.tokenization.tokenizer import Tokenizer

_AT_ONCE = 1 << 20
"""Number of tokens or documents that are read at a time, which limits memory."""

_PREPARE_AGAIN = "Delete the folder and prepare the tokens again."


@dataclass(frozen=True, eq=False)
class Shard:
    """Documents of one shard as concatenated token ids, which are read on demand."""

    name: str
    """`train-0`, `train-1`, ... or `validation`."""

    tokens: Tokens | ArrayFile
    """Ids, [tokens]. Every document is followed by its end-of-text id."""

    index: npt.NDArray[np.void] | ArrayFile
    """Rows of `INDEX_DTYPE`, one per document, [documents]."""

    source_names: tuple[str, ...]
    """Names of the corpus's files, in the order of their source indices."""

    sentences: npt.NDArray[np.uint64] | ArrayFile | None = None
    """End of each sentence (exclusive) in `tokens`, [sentences]. The end-of-text ids are in no sentence. None if the
    tokens were not made for masked language modelling.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including end-of-text ids."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.index)

    @property
    def ends(self) -> npt.NDArray[np.uint64]:
        """End of each document (exclusive) in `tokens`, [documents]."""
        blocks = (self.index[start : start + _AT_ONCE]["end"] for start in range(0, max(len(self.index), 1), _AT_ONCE))
        return np.concatenate(list(blocks))

    def files(self) -> list[str]:
        """Names of the files from which the documents come, in the order of the corpus."""
        blocks = range(0, len(self.index), _AT_ONCE)
        found = {int(n) for start in blocks for n in np.unique(self.index[start : start + _AT_ONCE]["source"])}
        return [self.source_names[number] for number in sorted(found)]

    def document(self, number: int) -> Tokens:
        """Return the ids of one document, including its end of text."""
        ends = self.index[max(number - 1, 0) : number + 1]["end"].tolist()
        ids: Tokens = self.tokens[ends[0] if number else 0 : ends[-1]]
        return ids

    def check_unchanged(self) -> None:
        """Raise `DataError` if a file of the shard has been written to or truncated since it was opened."""
        for part in (self.tokens, self.index, self.sentences):
            if isinstance(part, ArrayFile):
                part.check_unchanged()

    def origin(self, number: int) -> tuple[str, int]:
        """Return the origin of a document: (name of the file, record number in the file)."""
        row = self.index[number]
        return self.source_names[int(row["source"])], int(row["record"])


@dataclass(frozen=True, eq=False)
class TokenFolder:
    """A token folder that has been opened for sampling."""

    path: Path
    """Path of the folder."""

    manifest: TokenManifest
    """Description of the folder."""

    train: tuple[Shard, ...]
    """Training shards."""

    validation: Shard
    """Validation shard."""

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> TokenFolder:
        """Open a folder that `prepare` made.

        The manifest and the length of every file are always checked. With `verify`, all files are also read: each file
        must match its hash, every token must lie within the vocabulary, and every index must be in ascending order. If
        a check fails, `DamagedDataError` is raised. The message names the file.
        """
        manifest = TokenManifest.read(path)
        entries = (*manifest.train, manifest.validation)
        _check_lengths(path, manifest, entries)
        if verify:
            _check_hashes(path, manifest, entries)
        names = tuple(source.name for source in manifest.sources)
        shards = [_open_shard(path, manifest, entry, names) for entry in entries]
        for shard in shards:
            _check_shard(path, manifest, shard, thoroughly=verify)
        return cls(path, manifest, tuple(shards[:-1]), shards[-1])

    @property
    def vocab_size(self) -> int:
        """Highest id + 1."""
        return self.manifest.vocab_size

    @property
    def end_of_text(self) -> int:
        """Id at the end of every document."""
        return self.manifest.end_of_text

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer with which the tokens were made."""
        return Tokenizer.load(self.path / TOKENIZER_NAME)


def _files(manifest: TokenManifest, entries: tuple[ShardEntry, ...]) -> Iterator[tuple[str, int | None, str]]:
    """Name, length in bytes (None if unknown) and hash of every file of a folder."""
    yield TOKENIZER_NAME, None, manifest.tokenizer_sha256
    for entry in entries:
        yield f"{entry.name}.tokens", entry.tokens * manifest.token_dtype.itemsize, entry.tokens_sha256
        yield f"{entry.name}.index", entry.documents * INDEX_DTYPE.itemsize, entry.index_sha256
        if entry.sentences_sha256:
            yield f"{entry.name}.sentences", entry.sentences * SENTENCE_DTYPE.itemsize, entry.sentences_sha256


def _check_lengths(path: Path, manifest: TokenManifest, entries: tuple[ShardEntry, ...]) -> None:
    for name, length, _ in _files(manifest, entries):
        file = path / name
        if not file.is_file():
            raise DamagedDataError(
                f"`{file}` must exist, but is missing. {MANIFEST_NAME} lists this file. {_PREPARE_AGAIN}"
            )
        if length is not None and (actual := file.stat().st_size) != length:
            raise DamagedDataError(f"`{file}` must be {length:,} bytes long, but is {actual:,}. {_PREPARE_AGAIN}")


def _check_hashes(path: Path, manifest: TokenManifest, entries: tuple[ShardEntry, ...]) -> None:
    files = list(_files(manifest, entries))
    actual = sha256_of_all([path / name for name, _, _ in files], description=f"check {path}")
    for (name, _, expected), found in zip(files, actual, strict=True):
        if found != expected:
            raise DamagedDataError(
                f"`{path / name}` must have the SHA-256 {expected[:12]}... that {MANIFEST_NAME} lists, but has "
                f"{found[:12]}.... The file was changed or damaged. {_PREPARE_AGAIN}"
            )


def _open_shard(path: Path, manifest: TokenManifest, entry: ShardEntry, names: tuple[str, ...]) -> Shard:
    tokens = ArrayFile(path / f"{entry.name}.tokens", manifest.token_dtype, entry.tokens)
    index = ArrayFile(path / f"{entry.name}.index", INDEX_DTYPE, entry.documents)
    sentences = None
    if entry.sentences_sha256:
        sentences = ArrayFile(path / f"{entry.name}.sentences", SENTENCE_DTYPE, entry.sentences)
    return Shard(entry.name, tokens, index, names, sentences)


def _check_shard(path: Path, manifest: TokenManifest, shard: Shard, *, thoroughly: bool) -> None:
    end = int(shard.index[-1]["end"]) if shard.num_documents else 0
    ends = shard.ends if thoroughly else np.empty(0)
    ascending = bool(np.all(ends[1:] >= ends[:-1]))
    if end != shard.num_tokens or not ascending:
        raise DamagedDataError(
            f"`{path / shard.name}.index` must ascend to {shard.num_tokens:,}, the number of tokens in the shard, but "
            f"does not. The last entry is {end:,}. {_PREPARE_AGAIN}"
        )
    if thoroughly and shard.sentences is not None and not _sentences_fit(shard):
        raise DamagedDataError(
            f"`{path / shard.name}.sentences` must list the ends of sentences in ascending order, with the end of "
            f"every document among them, but does not. {_PREPARE_AGAIN}"
        )
    if thoroughly and shard.num_tokens and (highest := _highest(shard)) >= manifest.vocab_size:
        raise DamagedDataError(
            f"`{path / shard.name}.tokens` must hold ids below the vocabulary size {manifest.vocab_size:,}, but "
            f"holds {highest:,}. {_PREPARE_AGAIN}"
        )


def _sentences_fit(shard: Shard) -> bool:
    """Whether the sentences of a shard are in ascending order, and the last sentence of each document ends before the
    document's end of text.
    """
    assert shard.sentences is not None
    ends: npt.NDArray[np.uint64] = shard.sentences[:]
    documents = shard.ends
    last = documents[np.diff(documents, prepend=np.uint64(0)) > 1] - np.uint64(1)
    ascending = bool(np.all(ends[1:] > ends[:-1]))
    return ascending and bool(np.isin(last, ends).all()) and bool(np.all(ends <= last.max(initial=0)))


def _highest(shard: Shard) -> int:
    """Highest id in a shard. The shard must have tokens."""
    return max(int(shard.tokens[start : start + _AT_ONCE].max()) for start in range(0, shard.num_tokens, _AT_ONCE))
