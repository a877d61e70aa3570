"""Every pattern of the readers takes time in proportion to a text that repeats pieces of the pattern."""

import importlib
import pkgutil
import re
import string
from collections.abc import Iterator

import pytest

from crosscut.corpus import readers
from tests.timing import quickest

LENGTH = 12_000

SHORT = {
    "convert._FRACTION", "files._INDEX", "files._RANGE", "formulas._FRACTION", "numbers._PLAIN", "quantities._CHARGE",
    "tags._CLOSED", "tags._EXPONENT",
}  # fmt: skip
"""Patterns that read only texts of limited length: numbers, superscripts and the names of files."""

ANCHORED = {
    "markup._KEY", "markup._FUNCTION", "prose._LIST", "prose._ROW", "removal._END_OF_LINE", "selection._HTML",
    "selection._MAIL_LINE", "wikipedia._REDIRECT", "mime._HEADER", "mime._REST_OF_LINE", "responses._CHUNK",
}  # fmt: skip
"""Patterns that are only matched at one place, never searched."""


def _patterns() -> Iterator[tuple[str, re.Pattern[str] | re.Pattern[bytes]]]:
    for found in pkgutil.walk_packages(readers.__path__, f"{readers.__name__}."):
        for name, value in vars(importlib.import_module(found.name)).items():
            short = f"{found.name.rpartition('.')[2]}.{name}"
            if isinstance(value, re.Pattern) and short not in SHORT:
                yield short, value


PATTERNS = dict(_patterns())


def _pieces(pattern: str) -> list[str]:
    """Pieces of texts that a pattern may match: its words, its signs, and characters of its classes."""
    plain = re.sub(r"\\[dwsSDWbAZ]|\(\?[a-z<!=>:]*|\{\d*,?\d*\}", " ", pattern)
    words = [word for word in re.findall(r"[A-Za-z]{2,}", plain) if len(word) < 12][:4]
    signs = [sign for sign in dict.fromkeys(plain) if sign in string.punctuation][:12]
    marked = [f"<{word}" for word in words if "<" in plain][:2]
    return [*words, *signs, *marked, " ", "\n", "\r", "1", "a", "é", "<!-- -->"]


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_reads_repeated_pieces_in_a_moment(name: str) -> None:
    pattern = PATTERNS[name]
    is_text = isinstance(pattern.pattern, str)
    pieces = _pieces(pattern.pattern if is_text else pattern.pattern.decode("latin-1"))
    read = pattern.match if name in ANCHORED else pattern.search
    starts = ["", *pieces[:3], "[http://", "<!--", "charset="]
    for text in (start + piece * (LENGTH // len(piece)) + "~" for start in starts for piece in pieces):
        content = text if is_text else text.encode()
        assert quickest(lambda content=content: read(content), limit=0.05) < 0.05, (text[:40], LENGTH)
