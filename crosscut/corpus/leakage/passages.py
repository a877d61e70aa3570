"""Find the n-grams that documents share with test sets, join the n-grams into passages, and cut passages out.

A passage is a maximal sequence of consecutive n-grams of a document that all occur in one test set. A passage is either
copied text or a common phrase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from crosscut.corpus.batches import batches
from crosscut.corpus.leakage.grams import Grams, Numbers
from crosscut.corpus.words.ngrams import Hashes, Places, hash_words, ngrams
from crosscut.corpus.words.places import WordPlaces

SLICE_CHARACTERS = 4 << 20
"""Characters of text that are searched at a time, to bound memory."""

REACH = 100
"""Maximum number of characters by which the edge of a cut moves outwards to a space or line end."""

Span = tuple[int, int]


class Shared(NamedTuple):
    """The n-grams that one document shares with the test sets, in the order of the text. Most documents share none."""

    numbers: Numbers
    """Index of each shared n-gram in `Grams.hashes`, [hits]."""

    words: Places
    """Index of each n-gram's first word in the document, [hits]."""

    starts: Places
    """Position of each n-gram's first character in the document, [hits]."""

    ends: Places
    """Position after each n-gram's last character in the document, [hits]."""


class FoundGrams(NamedTuple):
    """Result of a search for n-grams of test sets in texts."""

    documents: list[Shared]
    asked: int
    """Number of n-grams that were looked up."""

    by_chance: int
    """Number of n-grams that passed the Bloom filter although no test set contains them."""


class Passage(NamedTuple):
    """Text that a document shares with a test set: a sequence of consecutive n-grams."""

    test_set: int
    item: int
    """The item (a text of the test set) that contains the most n-grams of the passage. If several items contain the
    same number, this is the first of them."""

    num_grams: int
    span: Span


class _TextSlice(NamedTuple):
    document: int
    text: str
    offset: int  # position of the slice in the document
    first_word: int


def search(texts: Sequence[str], grams: Grams) -> FoundGrams:
    """Find the n-grams that each text shares with the test sets. Each hit is confirmed by comparing its words."""
    shared: list[list[Shared]] = [[] for _ in texts]
    asked = by_chance = 0
    slices = (one for document, text in enumerate(texts) for one in _slices(document, text, grams.n))
    for batch in batches(slices, lambda one: len(one.text), SLICE_CHARACTERS):
        hashed = ngrams(hash_words([one.text for one in batch]), grams.n)
        places, numbers, false_positives = grams.look_up(hashed.hashes)
        asked += len(hashed.hashes)
        by_chance += false_positives
        bounds = np.searchsorted(places, hashed.starts)
        for one, start, first, last in zip(batch, hashed.starts, bounds, bounds[1:], strict=False):
            if first < last:
                shared[one.document].append(_confirm(one, places[first:last] - start, numbers[first:last], grams))
    return FoundGrams([_join(of_slices) for of_slices in shared], asked, by_chance)


def each_gram(texts: Sequence[str], n: int) -> Iterator[Hashes]:
    """Yield the hashes of all n-grams of texts, in batches that fit into memory. A text of fewer than `n` words has
    none.
    """
    slices = (one for document, text in enumerate(texts) for one in _slices(document, text, n))
    for batch in batches(slices, lambda one: len(one.text), SLICE_CHARACTERS):
        hashed = hash_words([one.text for one in batch])
        lengths, grams = np.diff(hashed.starts), ngrams(hashed, n)
        yield np.delete(grams.hashes, grams.starts[:-1][(lengths > 0) & (lengths < n)])


def _join(of_slices: list[Shared]) -> Shared:
    if not of_slices:
        return Shared(*(np.empty(0, dtype=np.int64) for _ in Shared._fields))
    return Shared(*(np.concatenate(values) for values in zip(*of_slices, strict=True)))


def _confirm(one: _TextSlice, places: Places, numbers: Numbers, grams: Grams) -> Shared:
    located = WordPlaces(one.text)
    whole = places + grams.n <= len(located)  # false for a text of fewer than n words, whose n-gram is shorter
    places, numbers = places[whole], numbers[whole]
    expected = grams.texts.take(numbers).to_pylist()
    same = [located.words(place, grams.n) == words for place, words in zip(places.tolist(), expected, strict=True)]
    places, numbers = places[same], numbers[same]
    starts, ends = located.spans(places, grams.n)
    return Shared(numbers, one.first_word + places, one.offset + starts, one.offset + ends)


def _slices(document: int, text: str, n: int) -> Iterator[_TextSlice]:
    """Cut a long text into slices. Each slice repeats the last n - 1 words of the previous slice, so that no n-gram is
    lost between slices and none occurs twice.
    """
    start = first_word = 0
    while len(text) - start > SLICE_CHARACTERS:
        end = _blank_before(text, start + SLICE_CHARACTERS, SLICE_CHARACTERS // 2)
        piece = text[start:end]
        yield _TextSlice(document, piece, start, first_word)
        located = WordPlaces(piece)
        again = n - 1 if n - 1 < len(located) else 0
        first_word += len(located) - again
        start += int(located.spans(np.array([len(located) - again]), 1)[0][0]) if again else len(piece)
    yield _TextSlice(document, text[start:], start, first_word)


def _blank_before(text: str, place: int, reach: int) -> int:
    """Find the last space or line end at or before `place`, searching back at most `reach` characters.

    If there is none, the result is `place` itself, or 0 if the text begins within `reach` characters.
    """
    low = max(place - reach, 0)
    found = max(text.rfind(" ", low, place + 1), text.rfind("\n", low, place + 1))
    return found if found >= 0 else (place if low else 0)


def _blank_after(text: str, place: int) -> int:
    high = min(place + REACH, len(text))
    found = [at for at in (text.find(" ", place, high), text.find("\n", place, high)) if at >= 0]
    return min(found) if found else (place if high < len(text) else high)


def passages(shared: Shared, grams: Grams) -> Iterator[Passage]:
    """Yield the passages that a document shares with test sets, ordered by test set and then by position."""
    hits, items = grams.items_of(shared.numbers)
    sets = grams.set_of_item[items]
    for test_set in np.unique(sets).tolist():
        own_hits, own_items = hits[sets == test_set], items[sets == test_set]
        distinct = np.unique(own_hits)
        for first, last in _runs(shared.words[distinct]):
            run = slice(*np.searchsorted(own_hits, [distinct[first], distinct[last] + 1]))
            candidates, counts = np.unique(own_items[run], return_counts=True)
            span = (int(shared.starts[distinct[first]]), int(shared.ends[distinct[last]]))
            yield Passage(test_set, int(candidates[counts.argmax()]), last - first + 1, span)


def _runs(numbers: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the indices of the first and the last element of each run of consecutive numbers."""
    if not len(numbers):
        return iter(())
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    firsts, lasts = [0, *(breaks + 1).tolist()], [*breaks.tolist(), len(numbers) - 1]
    return zip(firsts, lasts, strict=True)


def spans_to_cut(text: str, shared: Shared, *, margin: int) -> list[Span]:
    """Compute the spans to cut from a document: its shared n-grams, with `margin` characters on both sides.

    Each span begins and ends at a space or line end if possible. Overlapping spans are merged.
    """
    cuts: list[Span] = []
    for first, last in _runs(shared.words):
        start = _blank_before(text, max(int(shared.starts[first]) - margin, 0), REACH)
        end = _blank_after(text, min(int(shared.ends[last]) + margin, len(text)))
        if cuts and start <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(end, cuts[-1][1]))
        else:
            cuts.append((start, end))
    return cuts


def pieces(text: str, cuts: Sequence[Span]) -> list[str]:
    """Cut spans out of a text. Returns the remaining pieces, stripped of white space, without empty pieces."""
    bounds = [0, *(place for span in cuts for place in span), len(text)]
    left = (text[start:end].strip() for start, end in zip(bounds[::2], bounds[1::2], strict=True))
    return [piece for piece in left if piece]
