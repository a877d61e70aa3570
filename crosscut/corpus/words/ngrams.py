"""Hashed words and n-grams of words. The searches for duplicates and for leakage compare documents by these n-grams.

A word is a sequence of letters and digits, in lower case. Punctuation, spaces and line breaks only separate words, so
two layouts of the same text have the same n-grams. Hashes have 64 bits, so the probability that any two of a hundred
million distinct n-grams have the same hash is below 1 in 3,000.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.corpus.words.hashes import FACTOR, GOLDEN_FACTOR, HALF, fold_words

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_BETWEEN_WORDS = re.compile(r"[\W_]+")


class Hashed(NamedTuple):
    """Hashes of the words, or of the n-grams, of several documents."""

    hashes: Hashes
    """Hashes of all documents, one document after the other. The hashes of a document are in the order of its text."""

    starts: Places
    """Index of each document's first hash, and the total number of hashes at the end, [documents + 1]."""

    def of(self, number: int) -> Hashes:
        """Hashes of the document with index `number`."""
        return self.hashes[self.starts[number] : self.starts[number + 1]]


def words(text: str) -> list[str]:
    """Split a text into its words, in lower case."""
    return _BETWEEN_WORDS.sub(" ", text.lower()).split()


def hash_words(texts: Iterable[str]) -> Hashed:
    """Hash the words of texts. A word has the same hash in every process and on every machine."""
    hashes, counts = fold_words(list(texts))
    return Hashed(_mixed(hashes, rounds=1), np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()]))


def ngrams(hashed: Hashed, n: int) -> Hashed:
    """Hash the n-grams of documents, in the order of the text: n-gram i of a document begins at its word i.

    A document with fewer than `n` words has one n-gram, which holds all of its words. A document without words has no
    n-gram.
    """
    lengths = np.diff(hashed.starts)
    counts = np.where(lengths >= n, lengths - n + 1, np.minimum(lengths, 1))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])
    total = max(len(hashed.hashes) - n + 1, 0)
    rolled = hashed.hashes[:total].copy()
    for place in range(1, n if total else 0):
        rolled *= GOLDEN_FACTOR
        rolled += hashed.hashes[place : place + total]
    # Windows that reach into the next document are removed. Documents shorter than a window are handled below.
    inside = np.ones(total, dtype=bool)
    across = (hashed.starts[1:-1, None] - np.arange(1, n)).ravel()
    inside[across[(across >= 0) & (across < total)]] = False
    grams = rolled[inside]
    for number in np.flatnonzero((lengths < n) & (lengths > 0)).tolist():
        grams = np.insert(grams, starts[number], _combine(hashed.of(number)))
    return Hashed(_mixed(grams, rounds=2), starts)


def _combine(hashes: Sequence[np.uint64] | Hashes) -> np.uint64:
    combined = 0
    for value in hashes:
        combined = (combined * int(GOLDEN_FACTOR) + int(value)) & 0xFFFFFFFFFFFFFFFF
    return np.uint64(combined)


def _mixed(values: Hashes, *, rounds: int) -> Hashes:
    """Mix the bits of each value, in place, so that every bit depends on every other bit.

    Without mixing, the low bits of a hash would depend only on the low bits of the numbers from which it is computed.
    """
    shifted = values >> HALF
    for _ in range(rounds):
        values ^= shifted
        values *= FACTOR
        np.right_shift(values, HALF, out=shifted)
    values ^= shifted
    return values
