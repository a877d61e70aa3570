"""Hash the words of texts with array operations. This is far faster than hashing one string per word.

The UTF-8 bytes of a word are split into groups of eight bytes. Each group is read as a little-endian number; the last
group is padded with zero bytes, which no word contains. Most words have at most eight bytes, and the hash of such a
word is its single number. The numbers c_0, c_1, ... of a longer word are folded into one hash, the last h_i:

    h_0 = c_0        h_(i + 1) = (h_i ^ h_i >> 32) * FACTOR + c_(i + 1)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FACTOR = np.uint64(0xD6E8FEB86659FD93)
GOLDEN_FACTOR = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
"""Factors and the shift that mix the bits of hashes. The second factor is 2**64 divided by the golden ratio."""

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

BLOCK_CHARACTERS = 1 << 16
"""Number of characters that are processed at a time. The arrays for this number of characters fit into the processor's
cache."""


def fold_words(texts: Sequence[str]) -> tuple[Hashes, Places]:
    """Hash the words of all texts, in order. Returns the hashes of all words, and the number of words in each text.

    The bits of the hashes are not mixed yet; `hash_words` in the module `ngrams` mixes the bits.
    """
    counts = np.zeros(len(texts), np.int64)
    hashes = [np.empty(0, np.uint64)]
    for places, block in _blocks(texts):
        found, starts = _hash_block("\n" + "\n".join(block) + "\n")
        hashes.append(found)
        stops = np.cumsum([len(piece) + 1 for piece in block])
        np.add.at(counts, places, np.diff(np.searchsorted(starts, stops), prepend=0))
    return np.concatenate(hashes), counts


def _blocks(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Group lower-cased pieces of the texts into blocks. Each piece comes with the index of its text."""
    places: list[int] = []
    block: list[str] = []
    size = 0
    for place, text in enumerate(texts):
        for piece in _pieces(text):
            places.append(place)
            block.append(piece.lower())
            size += len(piece) + 1
            if size >= BLOCK_CHARACTERS:
                yield places, block
                places, block, size = [], [], 0
    if block:
        yield places, block


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces at spaces or line ends, so that memory stays bounded."""
    start = 0
    while len(text) - start > BLOCK_CHARACTERS:
        stop = max(text.rfind(blank, start, start + BLOCK_CHARACTERS) for blank in " \n")
        if stop < start:
            after = [text.find(blank, start + BLOCK_CHARACTERS) for blank in " \n"]
            stop = min((place for place in after if place >= 0), default=len(text))
        yield text[start:stop]
        start = stop + 1
    yield text[start:]


def _hash_block(text: str) -> tuple[Hashes, Places]:
    """Hash the words of a text that begins and ends outside a word. Returns the hashes and the start positions."""
    if text.isascii():
        encoded = text.encode("ascii")
        edges = _edges(np.frombuffer(encoded.translate(_ASCII_IN_WORDS), np.bool_))
        return _fold(encoded, edges), edges[::2]
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    edges = _edges(np.take(in_words(int(codes.max()).bit_length()), codes))
    return _fold(text.encode("utf-8", "surrogatepass"), edges + _bytes_beyond(codes, edges)), edges[::2]


def _bytes_beyond(codes: npt.NDArray[np.uint32], places: Places) -> Places:
    """For each of `places`, return the number of UTF-8 bytes minus the number of characters in the text before that
    place. `codes` are the character codes of the text.
    """
    wide = np.flatnonzero(codes >= 0x80)
    more = 1 + (codes[wide] >= 0x800) + (codes[wide] >= 0x10000).astype(np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(more)])[np.searchsorted(wide, places)]


def _edges(inside: npt.NDArray[np.bool_]) -> Places:
    """Positions where words begin and end, alternating."""
    return np.flatnonzero(inside[1:] != inside[:-1]) + 1


def _fold(encoded: bytes, edges: Places) -> Hashes:
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    eights = np.ndarray(len(encoded), "<u8", encoded + bytes(8), strides=1)  # eight bytes, starting at each byte
    hashes: Hashes = eights[starts] & _MASKS[np.minimum(lengths, 8)]
    longer = np.flatnonzero(lengths > 8)
    done = 8
    while len(longer):
        following = eights[starts[longer] + done] & _MASKS[np.minimum(lengths[longer] - done, 8)]
        folded = hashes[longer]
        hashes[longer] = (folded ^ folded >> HALF) * FACTOR + following
        done += 8
        longer = longer[lengths[longer] > done]
    return hashes


_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
"""Mask i keeps the first i of eight bytes."""


@lru_cache(maxsize=24)
def in_words(bits: int) -> npt.NDArray[np.bool_]:
    """Table with a boolean for each character code below 2**bits: True if words can contain the character."""
    count = min(1 << bits, sys.maxunicode + 1)
    return np.fromiter((chr(code).isalnum() for code in range(count)), np.bool_, count)


_ASCII_IN_WORDS = bytes(chr(code).isalnum() and code < 128 for code in range(256))
