"""ftfy's repair of text, to the letter, without the time that it takes.

ftfy takes a text line by line and turns each through a dozen passes until nothing changes; on most lines nothing does,
or only curly quotes and line ends. So one search over the whole text finds the lines that could change in any other
way, these alone go through ftfy, and quotes and line ends are replaced in all the others at once. The search may
suspect too much, which costs time; what keeps it from suspecting too little stands beside each of its conditions.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from crosscut.config.errors import DataError

DOUBLE_QUOTES = "\u201c\u201d\u201e\u201f"
"""What ftfy's `uncurl_quotes` turns into a straight double quote."""

SINGLE_QUOTES = "\u02bc\u2018\u2019\u201a\u201b"
"""What it turns into an apostrophe."""

EASY = DOUBLE_QUOTES + SINGLE_QUOTES + "\u2013\u2014\u2026"
"""Quotes, dashes and the ellipsis: beside ASCII and each other they are never a sign of mojibake."""

LONE_SIGNS = "\u0152\u0153\u00c2\u00c3"
"""Characters that can be a sign of mojibake beside ASCII; all others are one only beside another outside ASCII."""

SIGNS = "\u0080-\u04ff\u2000-\u26ff\uf8ff\ufb01\ufb02\ufffd"
"""Ranges that hold all signs of mojibake: what wrong decoding makes of bytes. Other scripts have none."""

MAX_LINE = 1_000_000
"""Characters after which ftfy cuts a line (its `max_decode_length`)."""


def repair(text: str) -> str:
    """What `ftfy.fix_text` makes of a text; the same object where that changes nothing."""
    engine = _engine()
    pieces: list[str] = []
    done = 0
    for stretch in _stretches(text):
        for start, stop in engine.suspects(text, stretch):
            pieces += (text[done:start], engine.mend(text[start:stop], stretch.unescape))
            done = stop
    mended = "".join((*pieces, text[done:])) if pieces else text
    # In lines that ftfy has mended there is nothing more to replace.
    if "\r" in mended:
        mended = mended.replace("\r\n", "\n")
    if not mended.isascii():
        for straight, curly in (('"', DOUBLE_QUOTES), ("'", SINGLE_QUOTES)):
            for quote in curly:
                mended = mended.replace(quote, straight)
    return text if mended == text else mended


class _Stretch(NamedTuple):
    """Whole lines of a text, at most a million characters."""

    start: int
    stop: int
    unescape: bool
    """Whether ftfy decodes HTML entities here: it no longer does from the first line with a `<` on."""

    def line(self, text: str, place: int) -> tuple[int, int]:
        """Start and end of the line around a place."""
        start = max(self.start, text.rfind("\n", self.start, place) + 1)
        return start, text.find("\n", place, self.stop) + 1 or self.stop


def _stretches(text: str) -> Iterator[_Stretch]:
    """A text in pieces that begin and end where ftfy begins and ends a line."""
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
    """ftfy, and the search for the lines that need it."""

    def __init__(self, ftfy: Any) -> None:
        tables = ftfy.chardata
        certain = {*tables.LIGATURES, *tables.WIDTH_MAP, *tables.CONTROL_CHARS}  # steps that replace single characters
        certain.update(range(0x80, 0xA0))  # `fix_c1_controls`
        certain.update((0x2028, 0x2029))  # `fix_line_breaks`, with 0x85 and the lone carriage return below
        certain.update(range(0xD800, 0xE000))  # `fix_surrogates`
        # `remove_terminal_escapes` begins with a control character.
        self._searches = {unescape: _Search(certain, unescape) for unescape in (True, False)}
        self._widths = {**tables.LIGATURES, **tables.WIDTH_MAP}
        self._is_bad = ftfy.badness.is_bad
        self._mend = ftfy.fix_text_segment
        self._configs = {
            unescape: ftfy.TextFixerConfig(unescape_html="auto" if unescape else False, explain=False)
            for unescape in (True, False)
        }

    def suspects(self, text: str, stretch: _Stretch) -> Iterator[tuple[int, int]]:
        """Start and end of the lines in which ftfy may change more than quotes and line ends."""
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
        """As `suspects`, where a line may not be normalized; every part of a normalized text is."""
        search = self._searches[stretch.unescape]
        place = stretch.start
        while place < stretch.stop:
            start, place = stretch.line(text, place)
            line = text[start:place]
            if not unicodedata.is_normalized("NFC", line) or search.certain(line) or self._is_mojibake(line):
                yield start, place

    def mend(self, line: str, unescape: bool) -> str:
        """What ftfy makes of a line, but for quotes and line ends where only widths and ligatures are to mend."""
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
"""What ftfy's heuristic, `is_bad`, needs to see: a control character of Latin-1, one of `LONE_SIGNS`, or two of `SIGNS`
that are not both `EASY`."""


class _Search:
    """Searches for what ftfy may change: `certain` for what no heuristic decides, `any` also for signs of mojibake,
    without a group. Both begin with one set of characters, which is what makes them fast.
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
            "`cleaning.unicode` needs the package ftfy, but it is not installed. Type `pip install 'crosscut[corpus]'`."
        ) from None
    return _Engine(ftfy)
