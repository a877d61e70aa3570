"""Texts as hashed words and n-grams of words: what two documents share, for duplicates and for leakage.

A word is a run of letters and digits, in lower case; punctuation, blanks and line breaks only part words, so that two
renderings of one text have the same n-grams. Hashes have 64 bits: among a hundred million distinct n-grams, the chance
that any two are taken for one is below one in three thousand.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.corpus.word_hashes import sums_of_words

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_BETWEEN_WORDS = re.compile(r"[\W_]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Hashed(NamedTuple):
    """The words, or n-grams, of some documents in a row."""

    hashes: Hashes
    """Of all of them, in the order of the text."""

    starts: Places
    """Where each document's begin, and at last where they end, [documents + 1]."""

    def of(self, number: int) -> Hashes:
        """Those of one document."""
        return self.hashes[self.starts[number] : self.starts[number + 1]]


def words(text: str) -> list[str]:
    """The words of a text."""
    return _BETWEEN_WORDS.sub(" ", text.lower()).split()


def hash_words(texts: Iterable[str]) -> Hashed:
    """The words of texts, each as a hash that is the same in every process and on every machine."""
    hashes, counts = sums_of_words(list(texts))
    return Hashed(_mixed(hashes), np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()]))


def ngrams(hashed: Hashed, n: int) -> Hashed:
    """The n-grams of documents, in the order of the text: gram i of a document begins at its word i.

    A document of fewer than `n` words has one, of all its words; one without words has none.
    """
    lengths = np.diff(hashed.starts)
    counts = np.where(lengths >= n, lengths - n + 1, np.minimum(lengths, 1))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])
    short = np.flatnonzero((lengths < n) & (lengths > 0))
    total = max(len(hashed.hashes) - n + 1, 0)
    rolled = np.zeros(total, dtype=np.uint64)
    for place in range(n if total else 0):
        rolled *= _FACTOR
        rolled += hashed.hashes[place : place + total]
    # Windows that reach into the next document are left out; there are none of a short document's own.
    ends = np.repeat(hashed.starts[1:], lengths)[:total]
    inside = np.arange(total) + n <= ends
    grams = np.empty(int(starts[-1]), dtype=np.uint64)
    is_short = np.zeros(len(grams), dtype=bool)
    is_short[starts[short]] = True
    grams[~is_short] = rolled[inside]
    for number in short.tolist():
        grams[starts[number]] = _combine(hashed.of(number))
    return Hashed(_mixed(grams), starts)


def _combine(hashes: Sequence[np.uint64] | Hashes) -> np.uint64:
    combined = 0
    for value in hashes:
        combined = (combined * int(_FACTOR) + int(value)) & 0xFFFFFFFFFFFFFFFF
    return np.uint64(combined)


def _mixed(values: Hashes) -> Hashes:
    """Every bit made to depend on every other, in place: sums of products leave the low ones to the last word."""
    for _ in range(2):
        values ^= values >> _HALF
        values *= _MIXER
    values ^= values >> _HALF
    return values
