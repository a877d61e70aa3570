"""Hashes of the words of texts, made from arrays of characters and not from words that are strings: far faster.

The hash of a word is a sum over the codes c_i of its characters:

    hash = sum_i c_i * FACTOR^i   mod 2**64

All words of a block come from one running sum over its characters: the difference between a word's end and its start,
times the inverse power of where it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FACTOR = 0xD6E8FEB86659FD93
INVERSE = pow(FACTOR, -1, 2**64)
BLOCK_CHARACTERS = 1 << 15
"""Few enough that the arrays of a block stay in the cache."""


def sums_of_words(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The hashes of the words of all texts in a row, and how many each text has."""
    counts = np.zeros(len(texts), np.int64)
    hashes = [np.empty(0, np.uint64)]
    for places, block in _blocks(texts):
        found, starts = _hash_block("\n" + "\n".join(block) + "\n")
        hashes.append(found)
        stops = np.cumsum([len(piece) + 1 for piece in block])
        np.add.at(counts, places, np.diff(np.searchsorted(starts, stops), prepend=0))
    return np.concatenate(hashes), counts


def _blocks(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Pieces of texts in lower case, with the places of the texts that they are of."""
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
    """A text cut between words, so that a long one takes no more memory; at blanks, whatever the language."""
    start = 0
    while len(text) - start > BLOCK_CHARACTERS:
        stop = max(text.rfind(blank, start, start + BLOCK_CHARACTERS) for blank in " \n")
        if stop < start:
            after = [text.find(blank, start + BLOCK_CHARACTERS) for blank in " \n"]
            stop = min((place for place in after if place >= 0), default=len(text))
        yield text[start:stop]
        start = stop + 1
    yield text[start:]


def _hash_block(text: str) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Hashes of the words of a text that begins and ends between words, and where each starts."""
    if text.isascii():
        encoded = text.encode("ascii")
        codes = np.frombuffer(encoded, np.uint8)
        inside = np.frombuffer(encoded.translate(_ASCII_IN_WORDS), np.bool_)
    else:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        inside = in_words(int(codes.max()).bit_length())[codes]
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    starts, ends = edges[::2], edges[1::2]
    powers, inverses = _powers((len(codes) - 1).bit_length())
    sums = codes * powers[: len(codes)]
    np.cumsum(sums, out=sums)
    return (sums[ends - 1] - sums[starts - 1]) * inverses[starts], starts


@lru_cache(maxsize=24)
def in_words(bits: int) -> npt.NDArray[np.bool_]:
    """Whether each character whose code has so many bits belongs to words."""
    count = min(1 << bits, sys.maxunicode + 1)
    return np.fromiter((chr(code).isalnum() for code in range(count)), np.bool_, count)


_ASCII_IN_WORDS = bytes(chr(code).isalnum() and code < 128 for code in range(256))


@lru_cache(maxsize=4)
def _powers(bits: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The first 2**bits powers of the factor and of its inverse, from the zeroth."""
    powers, inverses = (np.full(1 << bits, base, np.uint64) for base in (FACTOR, INVERSE))
    powers[0] = inverses[0] = 1
    return np.cumprod(powers), np.cumprod(inverses)
