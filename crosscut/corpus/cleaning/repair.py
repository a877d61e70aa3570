"""Repair text exactly as ftfy does, in a fraction of the time.

ftfy sends each line of a text through a dozen passes until nothing changes. Most lines do not change, or change only in
their curly quotes and line ends. This module first searches the whole text for lines that could change in any other
way. Only these lines go through ftfy. In all other lines, quotes and line ends are replaced directly. If the search
finds too many lines, the repair only takes longer. The search must never miss a line that ftfy would change. A comment
at each condition of the search explains why no such line is missed.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from crosscut.config.errors import DataError

DOUBLE_QUOTES = "\u201c\u201d\u201e\u201f"
"""Characters that ftfy's `uncurl_quotes` replaces by a straight double quote."""

SINGLE_QUOTES = "\u02bc\u2018\u2019\u201a\u201b"
"""Characters that ftfy's `uncurl_quotes` replaces by an apostrophe."""

EASY = DOUBLE_QUOTES + SINGLE_QUOTES + "\u2013\u2014\u2026"
"""Quotes, dashes and the ellipsis. These characters are never signs of mojibake next to ASCII or next to each other."""

LONE_SIGNS = "\u0152\u0153\u00c2\u00c3"
"""Characters that can be a sign of mojibake next to ASCII. All other signs of mojibake need a second non-ASCII
character."""

SIGNS = "\u0080-\u04ff\u2000-\u26ff\uf8ff\ufb01\ufb02\ufffd"
"""Ranges of characters that contain all signs of mojibake. A sign of mojibake is a character that wrong decoding
produces."""

MAX_LINE = 1_000_000
"""Number of characters after which ftfy splits a line (`max_decode_length` of ftfy)."""


def repair(text: str) -> str:
    """Repair a text as `ftfy.fix_text(text)` does. If nothing changes, `text` itself is returned."""
    engine = _engine()
    pieces: list[str] = []
    done = 0
    for stretch in _stretches(text):
        for start, stop in engine.suspects(text, stretch):
            pieces += (text[done:start], engine.mend(text[start:stop], stretch.unescape))
            done = stop
    mended = "".join((*pieces, text[done:])) if pieces else text
    # The replacements below change nothing in lines that ftfy has repaired.
    if "\r" in mended:
        mended = mended.replace("\r\n", "\n")
    if not mended.isascii():
        for straight, curly in (('"', DOUBLE_QUOTES), ("'", SINGLE_QUOTES)):
            for quote in curly:
                mended = mended.replace(quote, straight)
    return text if mended == text else mended


class _Stretch(NamedTuple):
    """Block of whole lines of a text, at most `MAX_LINE` characters long."""

    start: int
    stop: int
    unescape: bool
    """Whether ftfy decodes HTML entities in this block. ftfy stops decoding entities at the first line that contains a
    `<`."""

    def line(self, text: str, place: int) -> tuple[int, int]:
        """Start and end of the line that contains the position `place`."""
        start = max(self.start, text.rfind("\n", self.start, place) + 1)
        return start, text.find("\n", place, self.stop) + 1 or self.stop


def _stretches(text: str) -> Iterator[_Stretch]:
    """Split a text into blocks of whole lines. As in ftfy, a line longer than `MAX_LINE` characters is split there."""
    bracket = text.find("<")
    start = 0
    while start < len(text):
        stop = len(text)
        if stop - start > MAX_LINE:
            stop = start + MAX_LINE
            stop = text.rfind("\n", start, stop) + 1 or stop
        if start <= bracket < stop:
            line, _ = _Stretch(start, stop, True).line(text, bracket)
            if line > start:
                yield _Stretch(start, line, True)
            yield _Stretch(line, stop, False)
        else:
            yield _Stretch(start, stop, not 0 <= bracket < start)
        start = stop


class _Engine:
    """ftfy, together with the search for the lines that need ftfy."""

    def __init__(self, ftfy: Any) -> None:
        tables = ftfy.chardata
        certain = {*tables.LIGATURES, *tables.WIDTH_MAP, *tables.CONTROL_CHARS}  # mapped or removed one by one
        certain.update(range(0x80, 0xA0))  # `fix_c1_controls`
        # `fix_line_breaks` also replaces 0x85, which is in the range above, and lone carriage returns (see `_Search`).
        certain.update((0x2028, 0x2029))
        certain.update(range(0xD800, 0xE000))  # `fix_surrogates`
        # `remove_terminal_escapes` needs no entry: terminal escapes begin with a control character.
        self._searches = {unescape: _Search(certain, unescape) for unescape in (True, False)}
        self._widths = {**tables.LIGATURES, **tables.WIDTH_MAP}
        self._is_bad = ftfy.badness.is_bad
        self._mend = ftfy.fix_text_segment
        self._configs = {
            unescape: ftfy.TextFixerConfig(unescape_html="auto" if unescape else False, explain=False)
            for unescape in (True, False)
        }

    def suspects(self, text: str, stretch: _Stretch) -> Iterator[tuple[int, int]]:
        """Yield start and end of the lines in which ftfy may change more than quotes and line ends."""
        search = self._searches[stretch.unescape]
        if not unicodedata.is_normalized("NFC", text[stretch.start : stretch.stop]):
            yield from self._denormalized(text, stretch)
            return
        place = stretch.start
        while found := search.any(text, place, stretch.stop):
            start, place = stretch.line(text, found.start())
            if found.lastindex or self._is_bad(text[start:place]) or search.certain(text, start, place):
                yield start, place

    def _denormalized(self, text: str, stretch: _Stretch) -> Iterator[tuple[int, int]]:
        """Do the work of `suspects` for a block that is not in NFC. Each line must then also be checked for NFC."""
        search = self._searches[stretch.unescape]
        place = stretch.start
        while place < stretch.stop:
            start, place = stretch.line(text, place)
            line = text[start:place]
            if not unicodedata.is_normalized("NFC", line) or search.certain(line) or self._is_mojibake(line):
                yield start, place

    def mend(self, line: str, unescape: bool) -> str:
        """Repair a line as ftfy does.

        If only full-width characters and ligatures need repair, `mend` leaves quotes and line ends for `repair` to
        replace.
        """
        wide = line.translate(self._widths)
        if (
            self._searches[unescape].certain(wide)
            or self._is_mojibake(line)
            or self._is_mojibake(wide)
            or not unicodedata.is_normalized("NFC", wide)
        ):
            return str(self._mend(line, self._configs[unescape]))
        return wide

    def _is_mojibake(self, line: str) -> bool:
        return _DOUBTFUL.search(line) is not None and self._is_bad(line)


_ORDINARY = r"\t\n\x0c\x20-\x25\x27-\x7e"
_SIGN = rf"(?<=[{LONE_SIGNS}\x80-\x9f])|(?<=[{SIGNS}])(?=[{SIGNS}])|(?<=[{SIGNS}][{SIGNS}])"
_DOUBTFUL = re.compile(rf"[^{_ORDINARY}&{EASY}](?:{_SIGN})")
"""Pattern for text that may be mojibake: a control character of Latin-1, one character of `LONE_SIGNS`, or two
characters of `SIGNS` that are not both in `EASY`. ftfy's heuristic `is_bad` is never true for a line without this
pattern."""


class _Search:
    """Regular expressions for text that ftfy may change.

    `certain` finds text that ftfy always changes. `any` also finds signs of mojibake, which ftfy's heuristic must
    judge. A match of `any` has a group (`lastindex`) only if ftfy always changes the text. Both expressions begin with
    a single character set, which makes the search fast.
    """

    def __init__(self, certain: Iterable[int], unescape: bool) -> None:
        characters = "".join(re.escape(chr(code)) for code in sorted(certain))
        sure = rf"(?<=[{characters}])()|(?<=\r)(?!\n)()"
        ordinary = _ORDINARY
        if unescape:
            sure += "|(?<=&)#?[0-9A-Za-z]{1,24};()"  # `unescape_html`
        else:
            ordinary += "&"
        self.certain = re.compile(rf"[^{ordinary}](?:{sure})").search
        self.any = re.compile(rf"[^{ordinary}{EASY}](?:{sure}|{_SIGN})").search


@cache
def _engine() -> _Engine:
    try:
        import ftfy
    except ImportError:
        raise DataError(
            "`cleaning.unicode` needs the package ftfy, but ftfy is not installed. Run `pip install "
            "'crosscut[corpus]'`."
        ) from None
    return _Engine(ftfy)
