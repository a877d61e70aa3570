"""Find the main text of a web page with the library trafilatura, which is slower and more careful than resiliparse."""

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from crosscut.config.corpora import Extraction
from crosscut.config.errors import DataError
from crosscut.config.system.extras import install_command

_PARAGRAPH = "\n\n"
_BREAKS = {
    **dict.fromkeys(("p", "head", "quote", "list", "table", "div"), _PARAGRAPH),
    **dict.fromkeys(("item", "row", "lb"), "\n"),
}
"""Line breaks to write before each element of trafilatura's documents. The breaks of a paragraph are also written after
it."""
_SPACES = re.compile(r"\s+")
_BLANK_LINES = re.compile(r"\n{3,}")


def check_installed(extraction: Extraction) -> None:
    """Raise `DataError` if the extraction needs trafilatura and trafilatura is not installed."""
    if extraction is Extraction.CAREFUL and find_spec("trafilatura") is None:
        raise DataError(
            '`html.extraction` "careful" needs the package trafilatura, but trafilatura is not installed. Run '
            f"`{install_command('careful')}`."
        )


def extract_carefully(markup: str) -> str | None:
    """Return the main text of a page, with blank lines between paragraphs and without comments of readers.

    Returns None if trafilatura fails on the page or finds no main text.
    """
    library = import_module("trafilatura")
    try:
        document = library.bare_extraction(markup, include_comments=False, include_tables=True)
        pieces = [] if document is None or document.body is None else list(_pieces(document.body))
    except Exception:  # trafilatura and lxml raise many kinds of errors on broken pages
        return None
    lines = (line.rstrip() for line in "".join(pieces).split("\n"))
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip() or None


def _pieces(element: Any, *, verbatim: bool = False) -> Iterator[str]:
    """Yield the text of an element of trafilatura's document in pieces, with the line breaks around the element."""
    verbatim = verbatim or element.tag == "code"
    parent = element.getparent()
    is_part = element.tag == "p" and parent is not None and parent.tag in ("cell", "item")
    is_listing = element.tag == "code" and parent is not None and parent.tag in ("body", "div")
    around = " " if is_part else _PARAGRAPH if is_listing else _BREAKS.get(element.tag, "")
    yield around
    if element.tag == "cell" and element.getprevious() is not None:
        yield "\t\t"
    yield _text(element.text, verbatim=verbatim, starts_line="\n" in around)
    for part in element:
        yield from _pieces(part, verbatim=verbatim)
        yield _text(part.tail, verbatim=verbatim, starts_line=part.tag in _BREAKS)
    yield "" if around == "\n" else around


def _text(text: str | None, *, verbatim: bool, starts_line: bool) -> str:
    """Return text without the line breaks and the indentation of the markup, which mean nothing outside of code."""
    if verbatim or text is None:
        return text or ""
    words = _SPACES.sub(" ", text)
    return words.lstrip() if starts_line else words
