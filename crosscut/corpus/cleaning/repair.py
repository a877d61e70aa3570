"""Repair text with the same result as ftfy, in a fraction of the time.

`[cleaning]` chooses the steps of ftfy. ftfy applies all chosen steps to each line of a text until nothing changes. Most
lines do not change, or change only in their curly quotes and line ends. This module first searches the whole text for
lines that could change in any other way. Only these lines go through ftfy. In all other lines, quotes and line ends are
replaced directly. If the search finds a line that needs no repair, this only costs time. If it missed a line, the line
would be repaired wrongly. A comment at each condition of the search explains why no line is missed.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

from crosscut.config.corpora import CleaningConfig, Normalization
from crosscut.config.errors import DataError
from crosscut.config.system.extras import install_command

DOUBLE_QUOTES = "\u201c\u201d\u201e\u201f"
"""Characters that ftfy's `uncurl_quotes` replaces with a straight double quote."""

SINGLE_QUOTES = "\u02bc\u2018\u2019\u201a\u201b"
"""Characters that ftfy's `uncurl_quotes` replaces with an apostrophe."""

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


def repair(text: str, config: CleaningConfig) -> str:
    """Repair a text as `ftfy.fix_text` does with the settings `ftfy_settings(config)`. If nothing changes, `text`
    itself is returned.
    """
    engine = _engine(config)
    pieces: list[str] = []
    done = 0
    for stretch in _stretches(text):
        for start, stop in engine.suspects(text, stretch):
            pieces += (text[done:start], engine.mend(text[start:stop], stretch.unescape))
            done = stop
    mended = "".join((*pieces, text[done:])) if pieces else text
    # The replacements below change nothing in lines that ftfy has repaired.
    if config.fix_line_breaks and "\r" in mended:
        mended = mended.replace("\r\n", "\n")
    if config.uncurl_quotes and not mended.isascii():
        for straight, curly in (('"', DOUBLE_QUOTES), ("'", SINGLE_QUOTES)):
            for quote in curly:
                mended = mended.replace(quote, straight)
    return text if mended == text else mended


def ftfy_settings(config: CleaningConfig) -> dict[str, object]:
    """Return the settings of ftfy's `TextFixerConfig` for the keys of `[cleaning]`.

    Two keys control more than one step of ftfy. `fix_encoding` also controls the steps for Latin-1 control characters
    and for lone surrogates, because both come from wrong decoding. `remove_control_chars` also controls the step for
    terminal colour codes, because these codes begin with a control character.
    """
    return {
        "unescape_html": "auto" if config.unescape_html else False,
        "remove_terminal_escapes": config.remove_control_chars,
        "fix_encoding": config.fix_encoding,
        "fix_c1_controls": config.fix_encoding,
        "fix_latin_ligatures": config.fix_latin_ligatures,
        "fix_character_width": config.fix_character_width,
        "uncurl_quotes": config.uncurl_quotes,
        "fix_line_breaks": config.fix_line_breaks,
        "fix_surrogates": config.fix_encoding,
        "remove_control_chars": config.remove_control_chars,
        "normalization": "NFC" if config.normalization == Normalization.NFC else None,
    }


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
    """Split a text into blocks of whole lines. As in ftfy, a line longer than `MAX_LINE` characters is split after that
    number of characters.
    """
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


class _Repairer:
    """ftfy, together with the search for the lines that need ftfy."""

    def __init__(self, ftfy: ModuleType, config: CleaningConfig) -> None:
        settings = ftfy_settings(config)
        self._searches = {unescape: _Suspects(_certain(ftfy, config), config, unescape) for unescape in (True, False)}
        self._widths = _widths(ftfy, config)
        self._finds_mojibake = config.fix_encoding
        self._composes = config.normalization == Normalization.NFC
        self._is_bad = ftfy.badness.is_bad
        self._mend = ftfy.fix_text_segment
        self._configs = {
            True: ftfy.TextFixerConfig(**settings, explain=False),
            False: ftfy.TextFixerConfig(**{**settings, "unescape_html": False}, explain=False),
        }

    def suspects(self, text: str, stretch: _Stretch) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each line in which ftfy may change more than quotes and line ends."""
        search = self._searches[stretch.unescape]
        if not self._is_composed(text[stretch.start : stretch.stop]):
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
            if not self._is_composed(line) or search.certain(line) or self._is_mojibake(line):
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
            or not self._is_composed(wide)
        ):
            return str(self._mend(line, self._configs[unescape]))
        return wide

    def _is_composed(self, text: str) -> bool:
        """Whether the text needs no normalization."""
        return not self._composes or unicodedata.is_normalized("NFC", text)

    def _is_mojibake(self, line: str) -> bool:
        return self._finds_mojibake and _DOUBTFUL.search(line) is not None and bool(self._is_bad(line))


def _certain(ftfy: ModuleType, config: CleaningConfig) -> set[int]:
    """Characters that ftfy always changes."""
    certain = set(_widths(ftfy, config))  # mapped one by one
    if config.remove_control_chars:
        certain.update(ftfy.chardata.CONTROL_CHARS)  # removed one by one
        # `remove_terminal_escapes` needs no entry: terminal escapes begin with a control character.
    if config.fix_encoding:
        certain.update(range(0x80, 0xA0))  # `fix_c1_controls`
        certain.update(range(0xD800, 0xE000))  # `fix_surrogates`
    if config.fix_line_breaks:
        certain.update((0x85, 0x2028, 0x2029))  # `_Suspects` also finds lone carriage returns
    return certain


def _widths(ftfy: ModuleType, config: CleaningConfig) -> dict[int, str]:
    """Replacements of ligatures and of full-width and half-width characters, for `str.translate`."""
    ligatures = ftfy.chardata.LIGATURES if config.fix_latin_ligatures else {}
    return {**ligatures, **(ftfy.chardata.WIDTH_MAP if config.fix_character_width else {})}


_ORDINARY = r"\t\n\x0c\x20-\x25\x27-\x7e"
_SIGN = rf"(?<=[{LONE_SIGNS}\x80-\x9f])|(?<=[{SIGNS}])(?=[{SIGNS}])|(?<=[{SIGNS}][{SIGNS}])"
_DOUBTFUL = re.compile(rf"[^{_ORDINARY}&{EASY}](?:{_SIGN})")
"""Pattern for text that may be mojibake: a control character of Latin-1, one character of `LONE_SIGNS`, or two
characters of `SIGNS` that are not both in `EASY`. ftfy's heuristic `is_bad` is never true for a line without this
pattern."""


class _Suspects:
    """Regular expressions for text that ftfy may change.

    `certain` finds text that ftfy always changes. `any` also finds signs of mojibake, which ftfy's heuristic must
    judge. A match of `any` has a group (`lastindex`) only if ftfy always changes the text. Both expressions begin with
    a single character set, which makes the search fast.
    """

    def __init__(self, certain: Iterable[int], config: CleaningConfig, unescape: bool) -> None:
        characters = "".join(re.escape(chr(code)) for code in sorted(certain))
        sure = [rf"(?<=[{characters}])()"] if characters else []
        ordinary = _ORDINARY
        if config.fix_line_breaks:
            sure.append(r"(?<=\r)(?!\n)()")
        if config.unescape_html and unescape:
            sure.append("(?<=&)#?[0-9A-Za-z]{1,24};()")  # `unescape_html`
        else:
            ordinary += "&"
        doubtful = [*sure, _SIGN] if config.fix_encoding else sure
        self.certain = _searching(rf"[^{ordinary}]", sure)
        self.any = _searching(rf"[^{ordinary}{EASY}]", doubtful)


def _searching(first: str, rest: Sequence[str]) -> Callable[..., re.Match[str] | None]:
    """Make a function that searches a text for a character of the set `first`. One of the expressions in `rest` must
    match directly after this character.
    """
    return re.compile(f"{first}(?:{'|'.join(rest)})" if rest else "(?!)").search


@cache
def _engine(config: CleaningConfig) -> _Repairer:
    try:
        import ftfy
    except ImportError:
        raise DataError(
            f"`cleaning` needs the package ftfy, but ftfy is not installed. Run `{install_command('corpus')}`."
        ) from None
    return _Repairer(ftfy, config)
