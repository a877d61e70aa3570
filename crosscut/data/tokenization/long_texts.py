"""Texts of any length for the tokenizers library, in bounded memory.

The library keeps a record for every word and every token of a text until the whole text is done. If all words are
short, this takes up to 600 bytes of memory for each byte of the text. A text of more than `WINDOW` characters is
therefore encoded in windows that overlap. Two neighbours are joined where both have the same tokens at the same places:

    window 1  |--------------------------|= = = = = =|----|
    window 2                       |-----|= = = = = =|------------------------|

The joined ids are those of the whole text. A tokenizer finds words from left to right, so two windows that share the
start of a word also share the words after it. Inside a long word, a BPE merges two tokens only because of what the two
hold, so two windows that share a token also share the tokens after it. In a unigram model, the tokens of a word depend
on all of it, so windows are joined only where a word starts. If two windows cannot be joined, as in a word that becomes
one token whatever its length, the earlier window grows. If a larger window contradicts a smaller one, the text is
encoded as a whole. A single word without an end takes at most 170 bytes of memory for each of its bytes.

A tokenizer that is being trained gets long texts in pieces, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError

if TYPE_CHECKING:
    import tokenizers

WINDOW = 262_147
"""Length of a window in characters. It is a prime number: if the tokens of a window depend on its length, as those of
`aaaa` in a unigram model do, the tokens of two windows differ.
"""
OVERLAP = 1 << 13
"""Number of characters that two windows share. The windows must agree in the middle half of them."""
_GROWTH = 4
"""Factor by which a window grows if the next window does not agree with it."""

MOST_AT_ONCE = 1 << 22
"""Maximum length in characters of a text that has to be encoded as a whole, because the library cuts its tokens."""
_TEXTS_AT_ONCE = 10_000

LONG_WORD = 1000
"""Length in characters from which words are cut before a tokenizer is trained."""
_WORD = re.compile(r"(?:[^\W_]|[\u0300-\u036f])+|\s+|(?:[^\w\s]|_)+")
_WORD_START = re.compile(r"(?<=\S)(?= \S)|(?<=\n)(?=\S)")
"""Place between two words, whatever the tokenizer that Crosscut trains."""


Texts = TypeVar("Texts", str, tuple[str, str | None])
"""Text, or pair of texts."""


class LongText(NamedTuple):
    """Tokens of a text."""

    ids: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    """Index of the first character of each token."""
    ends: npt.NDArray[np.int64]
    """Index after the last character of each token."""

    def part(self, begin: int, stop: int | None = None) -> LongText:
        """Return the tokens from `begin` to `stop`, counted in tokens."""
        return LongText(self.ids[begin:stop], self.starts[begin:stop], self.ends[begin:stop])

    def first_after(self, place: int) -> int:
        """Index of the first token that ends after a character."""
        return int(np.searchsorted(self.ends, place, "right"))

    def between(self, first: int, end: int) -> LongText:
        """Return the tokens that have characters in this range."""
        return self.part(self.first_after(first), int(np.searchsorted(self.starts, end, "left")))

    def agrees_with(self, other: LongText) -> bool:
        """Whether both have the same tokens at the same places."""
        return (
            np.array_equal(self.ids, other.ids)
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.ends, other.ends)
        )


class _TextWindow(NamedTuple):
    tokens: LongText
    words: Sequence[int | None]
    """Number of each token's word."""
    start: int
    stop: int

    def has_word_start(self, first: int, end: int) -> bool:
        """Whether a word starts in this range of characters."""
        begin, stop = self.tokens.first_after(first), int(np.searchsorted(self.tokens.starts, end, "left"))
        return any(self.words[index] != self.words[index - 1] for index in range(begin + 1, stop))

    @property
    def next_start(self) -> int:
        """First character of the next window: the start of a word or, if there is none nearby, of a token."""
        place = max(self.start, self.stop - OVERLAP)
        last = int(np.searchsorted(self.tokens.starts, place, "right")) - 1
        if last < 0:
            return place
        for index in range(last, max(0, last - OVERLAP), -1):
            if self.words[index] != self.words[index - 1]:
                return int(self.tokens.starts[index])
        return int(self.tokens.starts[last])


def encode_one(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of a text of any length, without the special tokens that the tokenizer puts around texts."""
    if len(text) > WINDOW:
        long: list[int] = encode_long(inner, text).ids.tolist()
        return long
    (encoded,) = inner.encode_batch_fast([text], add_special_tokens=False)  # without offsets
    ids: list[int] = encoded.ids
    return ids


def encode_long(inner: tokenizers.Tokenizer, text: str) -> LongText:
    """Encode a text, without the special tokens that the tokenizer puts around texts. The ids are those that the
    library returns for the whole text.
    """
    parts = [] if len(text) <= WINDOW else list(_joined(inner, text))
    if not parts or parts[-1] is None:
        return _window(inner, text, 0, len(text)).tokens
    whole = list(filter(None, parts))
    return LongText(
        np.concatenate([part.ids for part in whole]),
        np.concatenate([part.starts for part in whole]),
        np.concatenate([part.ends for part in whole]),
    )


def _joined(inner: tokenizers.Tokenizer, text: str) -> Iterator[LongText | None]:
    """Yield the tokens of a text, part by part. Yield None at the end if the windows cannot be trusted."""
    inside_words = type(inner.model).__name__ == "BPE"
    window, size = _window(inner, text, 0, WINDOW), WINDOW
    joined, shared = -1, None  # end of the tokens that were yielded, and the tokens after it that the last window had
    while window.stop < len(text):
        start = window.next_start
        first, end = start + OVERLAP // 4, start + OVERLAP * 3 // 4
        following = _window(inner, text, start, WINDOW) if start > window.start else None
        is_joint = inside_words or window.has_word_start(first, end)
        agree = following and following.tokens.between(first, end).agrees_with(window.tokens.between(first, end))
        if following and is_joint and agree:
            yield window.tokens.part(window.tokens.first_after(joined), window.tokens.first_after(first))
            joined, shared = first, window.tokens.between(first, end)
            window, size = following, WINDOW
            continue
        size *= _GROWTH
        window = _window(inner, text, window.start, size)
        if shared and not window.tokens.between(joined, joined + OVERLAP // 2).agrees_with(shared):
            yield None
            return
    yield window.tokens.part(window.tokens.first_after(joined))


def _window(inner: tokenizers.Tokenizer, text: str, start: int, size: int) -> _TextWindow:
    stop = min(start + size, len(text))
    encoding = inner.encode(text[start:stop], add_special_tokens=False)
    ids = np.array(encoding.ids, dtype=np.uint32)
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
    return _TextWindow(LongText(ids, offsets[:, 0], offsets[:, 1]), encoding.word_ids, start, stop)


def batches(texts: Iterable[Texts], what: str) -> Iterator[list[Texts]]:
    """Group texts, or pairs of texts, that are encoded at a time: at most 10,000, with about `MOST_AT_ONCE` characters
    together. Raises `DataError` for a longer text. `what` is the noun before its number, such as "Text".
    """
    batch: list[Texts] = []
    size = 0
    for number, each in enumerate(texts, 1):
        for text in (each,) if isinstance(each, str) else filter(None, each):
            require_short(text, f"{what} {number:,}")
            size += len(text)
        batch.append(each)
        if len(batch) == _TEXTS_AT_ONCE or size >= MOST_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def require_short(text: str, what: str) -> None:
    """Raise `DataError` unless a text is short enough to be encoded as a whole. `what` names the text."""
    if len(text) > MOST_AT_ONCE:
        raise DataError(
            f"{what} must have at most {MOST_AT_ONCE:,} characters, because it is encoded as a whole, but has "
            f"{len(text):,}. Shorten the text."
        )


def pieces_for_training(text: str) -> Iterator[str]:
    """Cut a text into pieces from which a tokenizer is trained.

    A piece has at most about `WINDOW` characters, because the library needs up to 400 bytes for each of them. The cut
    is between two words if a word ends in the last `OVERLAP` characters, so the words and their numbers are those of
    the whole text. Words, numbers, and rows of blanks or marks of more than about 1,000 characters are cut anywhere.
    """
    for piece in _cut_long_words(text):
        start = 0
        while len(piece) - start > WINDOW:
            stop = start + WINDOW
            for found in _WORD_START.finditer(piece, stop - OVERLAP, stop):
                stop = found.start()
            yield piece[start:stop]
            start = stop
        yield piece[start:]


def _cut_long_words(text: str) -> Iterator[str]:
    """Cut a text inside words, numbers, and rows of blanks or marks of more than about 1,000 characters.

    The time of the training grows with the square of the longest word. Each word of 2,000 characters contains a slice
    of 1,000 that begins at a multiple of 1,000, so only these slices are looked at.
    """
    start = 0
    for place in range(0, len(text) - LONG_WORD + 1, LONG_WORD):
        if _WORD.fullmatch(text, place, place + LONG_WORD):
            yield from filter(None, (text[start:place], text[place : place + LONG_WORD]))
            start = place + LONG_WORD
    yield text[start:]
