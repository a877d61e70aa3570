"""Read .html files. Each file is one document: the main text of the page, without menus and footers, and the title.

`find_main_text` and `extract_carefully` find the main text; docs/decisions/0019-ingest.md compares them.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from crosscut.config.corpora import Extraction
from crosscut.corpus.extraction.careful import extract_carefully
from crosscut.corpus.extraction.main_text import find_main_text
from crosscut.corpus.readers.charsets import charset_in_page, decode
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.markup import Markup, limit_nesting
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, Skip, within_budget
from crosscut.corpus.readers.steps import TOO_COMPLEX, TooComplexError
from crosscut.corpus.readers.text import read_whole
from crosscut.data.text.records import Reject, excerpt, too_long

MAX_PAGE_BYTES = 16 * 10**6
"""Maximum size of a page in bytes. Parsing takes about a second for every 5 MB, and memory of up to 60 times the size
of a usual page. A page of small tags takes up to 150 times its size, until it has too many (`markup.MAX_TAGS`)."""

_FRAMES = re.compile(r"<frameset\b", re.IGNORECASE)


class HtmlPage(NamedTuple):
    """Text of a web page."""

    title: str
    text: str

    note: str
    """Names of the workarounds that were needed to read the page, as in `RawText.note`."""

    num_replaced: int = 0
    """Number of places that the charset of the page cannot decode."""


def read_html(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the document of a page. The function `decode` chooses the charset."""
    data = read_whole(file, reading.max_bytes)
    if isinstance(data, Reject):
        yield data
    else:
        yield within_budget(file.watch, "byte 0", data, lambda: _read_file(data, file, reading))


def _read_file(data: bytes, file: File, reading: ReaderSettings) -> Item:
    page = read_page(data, reading.extraction, place="byte 0")
    if not isinstance(page, HtmlPage):
        return page
    return RawText(page.text, 1, file.size, title=page.title, note=page.note, num_replaced=page.num_replaced)


def read_page(data: bytes, extraction: Extraction, *, place: str, charset: str = "") -> HtmlPage | Reject | Skip:
    """Read the main text of a page.

    `place` is the position of the page in its file, and `charset` the charset that the HTTP header declares.
    """
    if len(data) > MAX_PAGE_BYTES:
        return too_long(place, "the page", data, MAX_PAGE_BYTES, limit="the limit of web pages")
    decoded = decode(data, charset, charset_in_page(data))
    if decoded is None:
        return Reject(place, "charset", "no charset fits the bytes of the page", excerpt(data))
    markup, is_other, num_replaced = decoded
    try:
        title, text, is_fallback = extract_page(markup, extraction)
    except TooComplexError as error:
        return Reject(place, TOO_COMPLEX, str(error), excerpt(markup))
    if not text:
        return Skip(_reason(markup), 1)
    note = ", ".join(["charset"] * is_other + ["fast extraction"] * is_fallback)
    return HtmlPage(title, text, note, num_replaced)


def _reason(markup: str) -> str:
    if extract(markup, main_content=False)[1]:
        return "no main text"
    return "frameset" if _FRAMES.search(markup) else "blank"


def extract_page(markup: str, extraction: Extraction) -> tuple[str, str, bool]:
    """Return the title and the main text of a page, and whether the careful extraction failed and the fast one was used
    instead. Tags that would take too much time or memory are removed first (see `limit_nesting`, which raises
    `TooComplexError`).
    """
    limited = limit_nesting(markup)
    is_careful = extraction is Extraction.CAREFUL
    text = extract_carefully(limited.text) if is_careful and limited.is_searchable else None
    if text is not None:
        return _extract(limited, main_content=False)[0], text, False
    return *_extract(limited, main_content=True), is_careful


def extract(markup: str, *, main_content: bool) -> tuple[str, str]:
    """Return the title and the text of a page, with blank lines between paragraphs.

    If `main_content` is true, menus and everything else that surrounds the main text are left out. Tags that would take
    too much time or memory are removed first (see `limit_nesting`).
    """
    return _extract(limit_nesting(markup), main_content=main_content)


def _extract(markup: Markup, *, main_content: bool) -> tuple[str, str]:
    tree = HTMLTree.parse(markup.text)
    if main_content and markup.is_searchable:
        text = find_main_text(tree, markup.text)
    else:
        text = extract_plain_text(tree, main_content=False, alt_texts=False).strip()
    return " ".join((tree.title or "").split()), text
