"""Boundaries of sentences, found by rules that need no model.

A new sentence begins

1. after a blank line;
2. after `.`, `!`, `?` or the like, closing quotes and brackets, and a blank, unless the next letter is in lower case,
   or a full stop belongs to an initial (`J.`) or to one of `ABBREVIATIONS`;
3. after a full stop of Chinese or Japanese, with or without a blank.

The aim is pairs of consecutive segments for pretraining, as for BERT. A missing or additional boundary only makes a
segment longer or shorter, and does not change any token.
"""

import re

ABBREVIATIONS = frozenset(
    re.findall(
        r"\w+",
        "mr mrs ms dr prof st sr messrs mme mlle hon rev gen col capt lt sgt gov sen rep vs viz cf fig figs eq no nos "
        "vol vols pp ed eds ch sec jan feb mar apr jun jul aug sept oct nov dec ca bzw vgl nr bd str art",
    )
)
"""Abbreviations that usually stand before another word, in lower case and without the full stop."""

_CANDIDATE = re.compile(
    r"""(?P<paragraph>\n[^\S\n]*\n\s*)
    |(?P<mark>[.!?\u2026\u061f\u0964]+)["'\u2019\u201d\u00bb)\]]*\s+
    |[\u3002\uff01\uff1f]+["'\u2019\u201d\u300d\u300f\uff09)\]]*\s*""",
    re.VERBOSE,
)

_OPENING = "\"'`\u2018\u201c\u201e\u00ab\u00bf\u00a1([{_*"

_WORD_CHARACTERS = 12
"""Number of characters before a full stop that are searched for an abbreviation."""


def sentence_starts(text: str) -> list[int]:
    """Return the position of the first character of each sentence except the first, in ascending order. A blank between
    two sentences belongs to the first sentence.
    """
    starts = []
    for match in _CANDIDATE.finditer(text, len(text) - len(text.lstrip())):
        start = match.end()
        if start >= len(text):
            break
        mark = match["mark"]
        if mark is None or "\n\n" in match[0] or _ends(text, match.start(), mark, start):
            starts.append(start)
    return starts


def _ends(text: str, place: int, mark: str, start: int) -> bool:
    """Whether the punctuation mark at `place` ends a sentence. The next sentence would begin at `start`."""
    following = start
    while following < len(text) - 1 and text[following] in _OPENING:
        following += 1
    if text[following].islower():
        return False
    if mark != ".":
        return True
    before = text[max(place - _WORD_CHARACTERS, 0) : place].split()
    word = before[-1].lstrip(_OPENING) if before and not text[place - 1].isspace() else ""
    return not (len(word) == 1 and word.isupper()) and word.lower() not in ABBREVIATIONS
