"""Encoding of documents to token ids, each with its end of text.

The `tokenizers` library does the work, or gigatoken if gigatoken gives the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from crosscut.data.text.sentences import sentence_starts
from crosscut.data.tokenization.fast_encoder import FastEncoder, fast_encoder
from crosscut.data.tokenization.long_texts import WINDOW, encode_long

if TYPE_CHECKING:
    import tokenizers


class DocumentEncoder:
    """Encoder of documents with the vocabulary of a tokenizer. `inner` must be set to encode special tokens as plain
    text.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, vocab_size: int, end_of_text: int) -> None:
        self._inner = inner
        self._dtype = token_dtype(vocab_size)
        self._end_of_text = end_of_text

    @property
    def engine(self) -> str:
        """Library that encodes documents: `gigatoken` or `tokenizers`."""
        return "gigatoken" if self._fast else "tokenizers"

    @cached_property
    def _fast(self) -> FastEncoder | None:
        return fast_encoder(self._inner)

    def encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64]]:
        """Encode documents, each with its end of text.

        Returns (ids of all documents, concatenated; length of each document including its end of text). The ids have
        the type that a token folder uses for this vocabulary (`token_dtype`). Every `engine` gives the same ids.
        gigatoken runs on the calling thread, and the tokenizers library on its own threads.
        """
        return self._ended(self._encode_each(texts))

    def encode_sentences(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64], list[npt.NDArray[np.uint32]]]:
        """Encode documents as `encode` does, and find their sentences (`sentence_starts`).

        Returns the ids, the lengths, and for each document the ends of its sentences in tokens, [sentences]. A token
        on a boundary belongs to the later sentence. The last sentence ends before the end of text. A sentence without
        tokens is left out.
        """
        ids, sentences = [], []
        for text in texts:
            encoded = encode_long(self._inner, text)
            ids.append(encoded.ids)
            sentences.append(_sentence_ends(text, encoded.ends))
        return *self._ended(ids), sentences

    def _ended(
        self, documents: Iterable[npt.NDArray[np.uint32]]
    ) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64]]:
        """Append the end-of-text id to each document. Returns the concatenated ids, and the length of each document
        including this id.
        """
        end = np.array([self._end_of_text], dtype=self._dtype)
        pieces, lengths = [end[:0]], []
        for ids in documents:
            lengths.append(len(ids) + 1)
            pieces += (ids.astype(self._dtype), end)
        return np.concatenate(pieces), np.array(lengths, dtype=np.int64)

    def _encode_each(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        if self._fast:
            yield from map(self._fast.encode, texts)
            return
        for is_long, group in groupby(texts, lambda text: len(text) > WINDOW):
            if is_long:
                yield from (encode_long(self._inner, text).ids for text in group)
                continue
            for encoding in self._inner.encode_batch_fast(list(group), add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)


def token_dtype(vocab_size: int) -> np.dtype[np.uint16 | np.uint32]:
    """Return the type of a token id on disk, little-endian: two bytes for up to 65,536 entries, and four bytes for
    larger vocabularies.
    """
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _sentence_ends(text: str, last_characters: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Ends of a document's sentences, in tokens. `last_characters` holds the end of each token in the text."""
    ends = np.searchsorted(last_characters, sentence_starts(text), side="right")
    ends = np.unique(np.append(ends, len(last_characters)))
    return ends[ends > 0].astype(np.uint32)
