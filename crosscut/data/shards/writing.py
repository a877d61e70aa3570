"""Write token shards: split the documents into training and validation, and divide the training documents into equal
shards, in one pass.

The paper (section 4.1.3) splits documents 29:1 at random and divides the training documents into 5 equal shards, with
an end of text after each document. The split and the division are decided while the documents are streamed, so at most
one document waits in memory. The order of documents within a shard does not matter, because training shuffles the
documents in every epoch.
"""

import hashlib
import heapq
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError
from crosscut.data.manifest import ShardEntry
from crosscut.data.tokenization.encoding import EncodedBatch

INDEX_DTYPE = np.dtype([("end", "<u8"), ("record", "<u8"), ("source", "<u8")])
"""Row of an index: the end of the document (number of tokens from the start of the shard), its record number, and the
index of its source.
"""

_INDEX_ROW = struct.Struct("<QQQ")  # the same format, but much faster than numpy for a single row

SENTENCE_DTYPE = np.dtype("<u8")
"""End of a sentence: number of tokens from the start of the shard."""

BUFFERED_BYTES = 1 << 20

SPLIT_KEY = 1
"""Key of the split's random numbers. The sampler uses other keys, so its random numbers are independent of the split.
"""

_Item = TypeVar("_Item")


class TokenDocument(NamedTuple):
    """A document as token ids."""

    tokens: bytes | memoryview
    """Ids as bytes, in the format of the shard's file, including the end of text."""

    num_tokens: int
    """Number of ids in `tokens`."""

    source: int
    """Index of the source file."""

    record: int
    """Number of the record in the source file."""

    sentences: npt.NDArray[np.uint32] | None = None
    """Ends of the sentences, in tokens from the start of the document, [sentences]. None if the shard has no index of
    sentences.
    """


def split_batch(batch: EncodedBatch) -> Iterator[TokenDocument]:
    """Yield the documents of a batch one by one."""
    width = batch.tokens.itemsize
    data = batch.tokens.view(np.uint8).data
    start = 0
    sentences = batch.sentences or repeat(None, len(batch.lengths))
    for length, (source, record), ends in zip(batch.lengths.tolist(), batch.origins, sentences, strict=True):
        end = start + length * width
        yield TokenDocument(data[start:end], length, source, record, ends)
        start = end


def split_at_random(items: Iterable[_Item], *, train_to_validation: int, seed: int) -> Iterator[tuple[bool, _Item]]:
    """From each block of `train_to_validation` + 1 items, choose one item for validation. The choice is random, and
    follows from `seed`.

    Yields (whether the item is for validation, item) for every item. The order may change within a block. In an
    incomplete last block of c items, an item is chosen with probability c / (`train_to_validation` + 1). If this block
    is the only block, an item is always chosen. Raises `DataError` for fewer than two items.
    """
    # One item of each block is held back. The n-th item of the block replaces it with probability 1 / n. This gives
    # every item the same chance without knowing the size of the block in advance.
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
            f"The corpus must have at least 2 documents, one for training and one for validation, but has {count}. "
            "Provide more documents. One .txt file is enough if it has more than 16,384 characters, because it is then "
            "cut into several documents."
        )
    if held:
        yield count == place or draws.random_raw() % block < place, held.pop()


class ShardWriter:
    """Writer of one shard: `name.tokens` holds raw little-endian ids, and `name.index` holds rows of `INDEX_DTYPE`.
    With `sentences`, `name.sentences` holds elements of `SENTENCE_DTYPE`.
    """

    def __init__(self, folder: Path, name: str, *, sentences: bool = False) -> None:
        self._name = name
        self._sentences = _HashedFile(folder / f"{name}.sentences") if sentences else None
        self._num_sentences = 0
        self._tokens = _HashedFile(folder / f"{name}.tokens")
        self._index = _HashedFile(folder / f"{name}.index")
        self.num_tokens = 0
        self._num_documents = 0

    def add(self, document: TokenDocument) -> None:
        """Append a document."""
        data, length, source, record, sentences = document
        if self._sentences is not None:
            assert sentences is not None, "every document of the shard has sentences"
            self._num_sentences += len(sentences)
            self._sentences.write((sentences + np.uint64(self.num_tokens)).astype(SENTENCE_DTYPE).tobytes())
        self.num_tokens += length
        self._num_documents += 1
        self._tokens.write(data)
        self._index.write(_INDEX_ROW.pack(self.num_tokens, record, source))

    def finish(self) -> ShardEntry:
        """Write the buffered data and return the shard's description."""
        return ShardEntry(
            name=self._name,
            tokens=self.num_tokens,
            documents=self._num_documents,
            tokens_sha256=self._tokens.finish(),
            index_sha256=self._index.finish(),
            sentences=self._num_sentences,
            sentences_sha256=self._sentences.finish() if self._sentences is not None else "",
        )

    def close(self) -> None:
        """Close the files without writing the buffered data. For a finished shard, this has no effect."""
        self._tokens.close()
        self._index.close()
        if self._sentences is not None:
            self._sentences.close()


class _HashedFile:
    """A file that is hashed while it is written, in blocks that are large enough to keep the cost per document low."""

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
    sentences: bool = False,
) -> tuple[list[ShardEntry], ShardEntry]:
    """Write the documents from `split_at_random` to `num_shards` training shards and the validation shard.

    Each training document goes to the shard that has the fewest tokens so far. The sizes of the shards therefore differ
    by at most one document. With `sentences`, all documents have sentences, and each shard gets an index of sentences.
    Returns (descriptions of the training shards, description of the validation shard).
    """
    names = [*(f"train-{number}" for number in range(num_shards)), "validation"]
    with ExitStack() as stack:
        writers = (ShardWriter(folder, name, sentences=sentences) for name in names)
        *train, validation = [stack.enter_context(closing(writer)) for writer in writers]
        fewest = [(0, number) for number in range(num_shards)]  # a heap of (tokens, shard)
        for for_validation, document in documents:
            if for_validation:
                validation.add(document)
            else:
                number = fewest[0][1]
                train[number].add(document)
                heapq.heapreplace(fewest, (train[number].num_tokens, number))
        return [writer.finish() for writer in train], validation.finish()
