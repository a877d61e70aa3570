"""Boundaries of sentences, found by rules that need no model.

A new sentence begins

1. after a blank line;
2. after `.`, `!`, `?` or the like (`Terminals.spaced`), followed by any closing quotes and brackets and then a space.
   Exceptions: the next letter is in lower case, or the full stop belongs to an initial (`J.`) or to one of
   `ABBREVIATIONS`;
3. after a terminal of a script such as Chinese, Hindi or Amharic (`Terminals.own`), followed by any closing quotes and
   brackets, with or without a space.

The aim is pairs of consecutive segments for pretraining, as for BERT. A missing or additional boundary only makes a
segment longer or shorter, and does not change any token.
"""

import re
from functools import cache

from crosscut.data.text.terminals import terminals, terminals_digest

ABBREVIATIONS = frozenset(
    re.findall(
        r"\w+",
        "mr mrs ms dr prof st sr messrs mme mlle hon rev gen col capt lt sgt gov sen rep vs viz cf fig figs eq no nos "
        "vol vols pp ed eds ch sec jan feb mar apr jun jul aug sept oct nov dec ca bzw vgl nr bd str art",
    )
)
"""Abbreviations that usually stand before another word. They are listed in lower case and without the full stop."""

_AROUND_NUMBERS = "\u0964\u0965"
"""Strokes that end a sentence in Hindi, and stand on both sides of the number of a verse in Sanskrit."""

_WIDE_POINTS = "\uff0e\ufe52"
"""Full-width points. They end a sentence in Japanese, divide the parts of a foreign name in Chinese, and are decimal
points."""

_HIRAGANA = re.compile("[\u3041-\u309f]")

_OPENING = "\"'`\u2018\u201c\u201e\u00ab\u00bf\u00a1([{_*"

_WORD_CHARACTERS = 12
"""Number of characters before a full stop that are searched for an abbreviation."""

_VERSION = 2
"""Version of the rules, apart from the terminals. Version 1 had no name."""


def sentence_rules() -> str:
    """Name of the rules that find sentences. The name changes whenever the rules change in a way that can split a text
    differently.
    """
    return f"{_VERSION}, terminals {terminals_digest()}"


@cache
def _candidates() -> re.Pattern[str]:
    """Pattern for the places where a sentence may end. Each run of terminals is tried only once, from its first
    terminal, so that the search time is not quadratic in the length of the run.
    """
    marks = terminals()
    all_marks = re.escape(marks.all)
    spaced, own, every = (f"[{re.escape(one)}]" for one in (marks.spaced, marks.own, marks.all))
    # A single set at the start makes the search fast, if it has few members beyond U+FFFF.
    first = re.escape("".join(mark for mark in marks.all if mark < "\U00010000")) + "\U00010000-\U0010ffff"
    # An ellipsis that is followed by text, and a full-width point, may begin the next sentence.
    run = rf"(?:(?![\u2026{_WIDE_POINTS}]){every}|\u2026++(?![^\s{re.escape(marks.closing)}{all_marks}]))*+"
    closing, only_closing = (f"[{re.escape(one)}]*+" for one in (marks.closing, marks.only_closing))
    return re.compile(
        rf"""[\n{first}](?:
            # a blank line
            (?<=\n)[^\S\n]*+\n\s*
            # or the first terminal of a run,
            |(?<={every})(?<!{every}{every})(?:
                # with a terminal of a script; before a blank, an opening quotation mark closes
                (?:(?<={own})|(?={spaced}*+{own})){run}(?:[^\S\n]*+(?![{_WIDE_POINTS}]){own}{run})*+(?P<own>)
                    {only_closing}(?:{closing}(?=\s))?\s*
                # or without one; French has a blank before its closing quotation mark
                |{spaced}*+(?P<mark>){closing}(?:[\u00a0\u202f][\u00bb\u203a](?=\s))?\s+
            )
        )""",
        re.VERBOSE,
    )


def sentence_starts(text: str) -> list[int]:
    """Return the position of the first character of each sentence except the first, in ascending order. A blank between
    two sentences belongs to the first sentence.
    """
    starts = []
    for match in _candidates().finditer(text, len(text) - len(text.lstrip())):
        start = match.end()
        if start >= len(text):
            break
        place, after_own, after_mark = match.start(), match.end("own"), match.end("mark")
        if after_own > 0:
            ends = after_own < start or _ends_without_blank(text, start)
        elif after_mark > 0:
            ends = "\n\n" in match[0] or _ends(text, place, text[place:after_mark], start)
        else:
            ends = True
        if ends:
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


def _ends_without_blank(text: str, start: int) -> bool:
    """Whether a terminal of `Terminals.own` ends a sentence directly before the position `start`."""
    mark = text[start - 1]
    if mark in _WIDE_POINTS:
        return _HIRAGANA.match(text, start - 2) is not None and text[start] not in _WIDE_POINTS
    return mark not in _AROUND_NUMBERS or not text[start].isdigit()
