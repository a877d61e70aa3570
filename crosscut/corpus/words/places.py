"""Where the words of a text stand: leads from n-grams back to what was written."""

from __future__ import annotations

import numpy as np

from crosscut.corpus.words.hashes import in_words
from crosscut.corpus.words.ngrams import Places, words

_DOTTED_I = "\u0130"
"""In lower case it has two characters, and it alone has more than one."""


class WordPlaces:
    """The words of one text, counted as `words` gives them."""

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
        """Consecutive words, with blanks between."""
        return " ".join(words(self._lowered[self._starts[first] : self._ends[first + count - 1]]))

    def spans(self, firsts: Places, count: int) -> tuple[Places, Places]:
        """Where in the text `count` words begin and end, for each of some first words."""
        starts, lasts = self._starts[firsts], self._ends[firsts + (count - 1)] - 1
        if self._origins is not None:
            starts, lasts = self._origins[starts], self._origins[lasts]
        return starts, lasts + 1
