"""Positions of the words in a text. The positions lead from an n-gram back to the original passage."""

from __future__ import annotations

import numpy as np

from crosscut.corpus.words.hashes import in_words
from crosscut.corpus.words.ngrams import Places, words

_DOTTED_I = "\u0130"
"""The only character whose lower case has two characters."""


class WordPlaces:
    """Positions of the words in one text. Words are counted from 0, in the order of `words(text)`."""

    def __init__(self, text: str) -> None:
        self._lowered = text.lower()
        codes = np.frombuffer(self._lowered.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        known = in_words(int(codes.max(initial=0)).bit_length())
        edges = np.flatnonzero(np.diff(known[codes], prepend=False, append=False))
        self._starts, self._ends = edges[::2], edges[1::2]
        self._origins: Places | None = None
        if len(self._lowered) != len(text):
            self._origins = np.repeat(np.arange(len(text)), [1 + (character == _DOTTED_I) for character in text])

    def __len__(self) -> int:
        return len(self._starts)

    def words(self, first: int, count: int) -> str:
        """Return `count` consecutive words, beginning with word number `first`, joined by spaces."""
        return " ".join(words(self._lowered[self._starts[first] : self._ends[first + count - 1]]))

    def spans(self, firsts: Places, count: int) -> tuple[Places, Places]:
        """Return the start and the exclusive end of each sequence of `count` words, in characters of the original text.

        `firsts` holds the number of each sequence's first word.
        """
        starts, lasts = self._starts[firsts], self._ends[firsts + (count - 1)] - 1
        if self._origins is not None:
            starts, lasts = self._origins[starts], self._origins[lasts]
        return starts, lasts + 1
