"""Punctuation at the end of a sentence, in every language.

A terminal is a character with the Unicode property Sentence_Terminal (UAX 29, Unicode Text Segmentation), or one of
`ADDED`. The regular expressions of the tokenizers library know the property. Closing quotation marks and brackets may
follow a terminal. Everything in Crosscut that recognises the end of a sentence uses this module.
"""

import hashlib
import unicodedata
from functools import cache
from typing import NamedTuple

ADDED = "\u2026\u037e\u05c3\u0f0d\u0f0e\u0f0f\u0f10\u0f11"
"""Terminals without the property: the ellipsis, the Greek question mark, the end of a verse in the Hebrew Bible, and
the strokes of Tibetan, which end clauses and sentences."""

_SEPARATING = (range(0x500), range(0x2000, 0x2070), range(0x2E00, 0x2E80))
"""Code points of the terminals of ASCII, Greek, General Punctuation and Supplemental Punctuation. These terminals
belong to scripts that always put a blank between two sentences."""

_INVISIBLE = "\u200e\u200f\ufe0e\ufe0f"
"""Marks of direction and of emoji, which may follow a terminal."""

_PLANES_END = 0x20000
"""End of the planes with punctuation. All later planes hold ideographs, tags and private characters."""


class Terminals(NamedTuple):
    """Characters that end a sentence, and characters that may follow them."""

    spaced: str
    """Terminals, such as `.`, `?` and the ellipsis, that end a sentence only if a blank follows."""

    own: str
    """Terminals of one script or of a few scripts, such as the full stops of Chinese, Hindi and Amharic. The next
    sentence may begin without a blank."""

    closing: str
    """Closing quotation marks and brackets. A mark is included if it closes quotations in any language, even if it
    opens quotations in another language. For example, the mark that opens a quotation in English closes one in German.
    """

    only_closing: str
    """Members of `closing`, without the marks that open a quotation in a language written without blanks, such as
    Chinese."""

    @property
    def all(self) -> str:
        """All terminals."""
        return self.spaced + self.own


@cache
def terminals() -> Terminals:
    """Return the terminals that the tokenizers library knows. The first call takes up to a quarter of a second."""
    from tokenizers import Regex, normalizers

    known = [chr(code) for code in range(_PLANES_END) if not 0xD800 <= code < 0xE000]
    keep = normalizers.Replace(Regex(r"\P{Sentence_Terminal}+"), "")
    found = keep.normalize_str("".join(known)) + ADDED
    spaced = "".join(mark for mark in found if any(ord(mark) in part for part in _SEPARATING))
    kinds = [(character, unicodedata.category(character)) for character in known]
    only_closing = "".join(character for character, kind in kinds if kind in ("Pe", "Pf")) + "\"'\uff02\uff07"
    opening = "".join(character for character, kind in kinds if kind == "Pi")
    return Terminals(
        spaced=spaced,
        own="".join(mark for mark in found if mark not in spaced),
        closing=only_closing + opening + _INVISIBLE,
        only_closing=only_closing + _INVISIBLE,
    )


def ends_sentence(text: str) -> bool:
    """Whether the last characters of a text, apart from blanks and closing marks, are a terminal."""
    if text[-1:].isalnum():  # most texts that end elsewhere
        return False
    last = text.rstrip(_trailing())[-1:]
    return bool(last) and last in terminals().all


@cache
def _trailing() -> str:
    blanks = "".join(map(chr, filter(lambda code: chr(code).isspace(), range(0x3001))))
    return terminals().closing + blanks


def terminals_digest() -> str:
    """Return a hash of all characters that this module knows. These characters differ between versions of Unicode."""
    return hashlib.sha256("\n".join(terminals()).encode()).hexdigest()[:16]
