"""Encode documents to token ids on all cores, in the order of the documents.

Text is sent to worker processes in batches of about 262,144 characters, and the results are collected in the same
order. The result therefore does not depend on the number of workers. The number of batches in progress is limited, so
memory does not grow with the corpus. Processes are used instead of the library's own threads for two reasons: processes
do not compete for one memory allocator, and the conversion of encodings to arrays also runs on all cores.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError
from crosscut.config.system.machine import leave_with_parent
from crosscut.data.text.documents import TextDocument
from crosscut.data.tokenization.tokenizer import Tokenizer

BATCH_CHARACTERS = 256 * 1024

Tokens = npt.NDArray[np.uint16 | np.uint32]


class EncodedBatch(NamedTuple):
    """Consecutive documents as token ids."""

    tokens: Tokens
    """Ids of all documents, concatenated; each document ends with its end-of-text id."""

    lengths: npt.NDArray[np.int64]
    """Number of tokens of each document."""

    origins: list[tuple[int, int]]
    """Source index and record number of each document."""

    num_bytes: int
    """Size of the encoded text in UTF-8 bytes."""

    position: int
    """Number of bytes on disk, over the whole corpus, that had been read when the batch was complete."""

    sentences: list[npt.NDArray[np.uint32]] | None = None
    """Ends of the sentences of each document, in tokens from the start of the document. None if sentences were not
    requested."""


Encoded = tuple[Tokens, npt.NDArray[np.int64], list[npt.NDArray[np.uint32]] | None]
"""Ids, lengths and sentences, as in `EncodedBatch`."""


class _TextBatch(NamedTuple):
    texts: list[str]
    origins: list[tuple[int, int]]
    num_bytes: int
    position: int


def encode_documents(
    documents: Iterable[TextDocument],
    tokenizer: Path,
    *,
    workers: int,
    end_of_text: int | None = None,
    sentences: bool = False,
) -> Iterator[EncodedBatch]:
    """Encode documents with the `tokenizer.json` at the path `tokenizer`. Each document ends with `end_of_text`, or
    with the tokenizer's own end-of-text id if `end_of_text` is None. With `sentences`, also find the sentences.

    If `workers` is 1, the current process encodes; if `workers` is larger, that number of processes encode. Raises the
    errors that reading the documents raises, and `DataError` if a worker process dies.
    """
    batches = _gather(documents)
    if workers == 1:
        inner = Tokenizer.load(tokenizer, end_of_text=end_of_text)
        for batch in batches:
            yield _encoded(batch, encode(inner, batch.texts, sentences=sentences))
        return
    # The workers are spawned, because a fork would copy locks that the tokenizer library's threads may hold.
    context = multiprocessing.get_context("spawn")
    start = partial(_start_worker, tokenizer, end_of_text)
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=start)
    under_way: deque[tuple[_TextBatch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch._replace(texts=[]), executor.submit(_encode_in_worker, batch.texts, sentences)))
            if len(under_way) > 2 * workers:
                yield _next(under_way)
        while under_way:
            yield _next(under_way)
    except BrokenProcessPool:
        raise DataError(
            f"All {workers} tokenizing processes must finish, but one died, perhaps because memory ran out, or because "
            'a Python program calls `prepare` outside of `if __name__ == "__main__":`. Free some memory, or use fewer '
            "cores: `taskset --cpu-list 0 crosscut prepare ...` on Linux, `prepare(..., workers=1)` in Python."
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _gather(documents: Iterable[TextDocument]) -> Iterator[_TextBatch]:
    texts: list[str] = []
    origins: list[tuple[int, int]] = []
    size = position = 0
    for text, source, record, position in documents:
        texts.append(text)
        origins.append((source.index, record))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield _TextBatch(texts, origins, _num_bytes(texts), position)
            texts, origins, size = [], [], 0
    if texts:
        yield _TextBatch(texts, origins, _num_bytes(texts), position)


def _num_bytes(texts: list[str]) -> int:
    return sum(len(text.encode("utf-8")) for text in texts)


def _next(under_way: deque[tuple[_TextBatch, Future[Encoded]]]) -> EncodedBatch:
    batch, future = under_way.popleft()
    return _encoded(batch, future.result())


def _encoded(batch: _TextBatch, encoded: Encoded) -> EncodedBatch:
    tokens, lengths, sentences = encoded
    return EncodedBatch(tokens, lengths, batch.origins, batch.num_bytes, batch.position, sentences)


def encode(tokenizer: Tokenizer, texts: list[str], *, sentences: bool) -> Encoded:
    """Encode documents. With `sentences`, also find the ends of their sentences."""
    if sentences:
        return tokenizer.documents.encode_sentences(texts)
    return *tokenizer.documents.encode(texts), None


_worker_tokenizer: list[Tokenizer] = []  # the tokenizer of a worker process, which `_start_worker` loads once


def _start_worker(tokenizer: Path, end_of_text: int | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already provide the parallelism
    for number in (signal.SIGINT, signal.SIGUSR1):  # the parent stops the workers
        signal.signal(number, signal.SIG_IGN)
    leave_with_parent()  # a closed pipe does not show the end of the parent, because other workers keep pipes open
    _worker_tokenizer.append(Tokenizer.load(tokenizer, end_of_text=end_of_text))


def _encode_in_worker(texts: list[str], sentences: bool) -> Encoded:
    return encode(_worker_tokenizer[0], texts, sentences=sentences)
