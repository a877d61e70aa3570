"""Writing token shards: the split into training and validation, and equal training shards, in one pass.

Paper, section 4.1.3: documents are split 29:1 at random, and the training documents divided into 5 equal shards, with
an end of text after each document. Both are decided while the documents stream by, so nothing but one document is held
back, and the order of documents within a shard does not matter, since training shuffles it every epoch.
"""

import hashlib
import heapq
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from crosscut.config.errors import DataError
from crosscut.data.manifest import ShardEntry
from crosscut.data.tokenization.encoding import EncodedBatch

INDEX_DTYPE = np.dtype([("end", "<u8"), ("record", "<u8"), ("source", "<u8")])
"""A row of an index: where the document ends, in tokens; its record; the index of its source."""

_INDEX_ROW = struct.Struct("<QQQ")  # the same, packed many times faster than numpy packs a single row

BUFFERED_BYTES = 1 << 20

SPLIT_KEY = 1
"""Tells the split's random bits from the sampler's, which have keys of their own."""

_Item = TypeVar("_Item")


class TokenDocument(NamedTuple):
    """A document as token ids."""

    tokens: bytes | memoryview
    """Ids as they lie on disk, with the end of text."""

    num_tokens: int
    """Number of ids in `tokens`."""

    source: int
    """Index of the source."""

    record: int
    """Number of the record in the source."""


def split_batch(batch: EncodedBatch) -> Iterator[TokenDocument]:
    """The documents of a batch."""
    width = batch.tokens.itemsize
    data = batch.tokens.view(np.uint8).data
    start = 0
    for length, (source, record) in zip(batch.lengths.tolist(), batch.origins, strict=True):
        end = start + length * width
        yield TokenDocument(data[start:end], length, source, record)
        start = end


def split_at_random(items: Iterable[_Item], *, train_to_validation: int, seed: int) -> Iterator[tuple[bool, _Item]]:
    """Choose one item for validation in each block of `train_to_validation` + 1, at random from the seed.

    Yields (is for validation, item), every item once; within a block the order may change. A last block of c items
    gives one with probability c / (`train_to_validation` + 1), the first block always. Raises `DataError` for fewer
    than two items.
    """
    # One item of each block is held back: a later one takes its place with probability 1 / (its place from 1), which
    # leaves every item of the block the same chance, without knowing how many will come.
    draws = np.random.PCG64(np.random.SeedSequence([seed, SPLIT_KEY]))
    block = train_to_validation + 1
    held: list[_Item] = []
    place = count = 0
    for item in items:
        count += 1
        place += 1
        if not held:
            held.append(item)
        elif draws.random_raw() % place == 0:
            yield False, held.pop()
            held.append(item)
        else:
            yield False, item
        if place == block:
            yield True, held.pop()
            place = 0
    if count < 2:
        raise DataError(
            f"The corpus must have at least 2 documents, to train on one and validate on the other, but has {count}. "
            f"Give more text; a .txt file makes a document of each 16 KiB."
        )
    if held:
        yield count == place or draws.random_raw() % block < place, held.pop()


class ShardWriter:
    """Writes one shard: `name.tokens`, raw little-endian ids, and `name.index`, rows of `INDEX_DTYPE`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._name = name
        self._tokens = _HashedFile(folder / f"{name}.tokens")
        self._index = _HashedFile(folder / f"{name}.index")
        self.num_tokens = 0
        self._num_documents = 0

    def add(self, document: TokenDocument) -> None:
        """Append a document."""
        data, length, source, record = document
        self.num_tokens += length
        self._num_documents += 1
        self._tokens.write(data)
        self._index.write(_INDEX_ROW.pack(self.num_tokens, record, source))

    def finish(self) -> ShardEntry:
        """Write what is buffered and describe the shard."""
        return ShardEntry(
            name=self._name,
            tokens=self.num_tokens,
            documents=self._num_documents,
            tokens_sha256=self._tokens.finish(),
            index_sha256=self._index.finish(),
        )

    def close(self) -> None:
        """Close both files as they are; does nothing to a shard that is finished."""
        self._tokens.close()
        self._index.close()


class _HashedFile:
    """A file that is hashed as it is written, in pieces large enough that neither costs much per document."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._buffer = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._buffer += data
        if len(self._buffer) >= BUFFERED_BYTES:
            self._flush()

    def finish(self) -> str:
        self._flush()
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        self._hash.update(self._buffer)
        self._file.write(self._buffer)
        self._buffer.clear()


def write_shards(
    documents: Iterable[tuple[bool, TokenDocument]],
    folder: Path,
    *,
    num_shards: int,
) -> tuple[list[ShardEntry], ShardEntry]:
    """Write the documents of `split_at_random` to `num_shards` training shards and the validation shard.

    Each training document goes to the shard that has the fewest tokens, so that shards differ by at most one document.
    Returns the descriptions of the training shards and of the validation shard.
    """
    names = [*(f"train-{number}" for number in range(num_shards)), "validation"]
    with ExitStack() as stack:
        *train, validation = [stack.enter_context(closing(ShardWriter(folder, name))) for name in names]
        fewest = [(0, number) for number in range(num_shards)]  # a heap of (tokens, shard)
        for for_validation, document in documents:
            if for_validation:
                validation.add(document)
            else:
                number = fewest[0][1]
                train[number].add(document)
                heapq.heapreplace(fewest, (train[number].num_tokens, number))
        return [writer.finish() for writer in train], validation.finish()
