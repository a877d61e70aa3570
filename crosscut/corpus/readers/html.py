"""Read .html files. Each file is one document: the main text of the page, without menus and footers, and the title.

`find_main_text` and `extract_carefully` find the main text; docs/decisions/0019-ingest.md compares them.
"""

import re
from collections.abc import Iterator
from itertools import accumulate

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from crosscut.config.corpora import Extraction
from crosscut.corpus.extraction.careful import extract_carefully
from crosscut.corpus.extraction.main_text import find_main_text
from crosscut.corpus.readers.charsets import decode
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.lines import read_whole
from crosscut.corpus.readers.record import Item, Reading, Reject, Skip, Text, excerpt

MAX_DEPTH = 1000
"""Maximum nesting depth of `<div>` elements. The main text of a deeper page is not searched, and the whole text is used
instead, because the time of the search grows with the square of the depth. Browsers support half of this depth.
"""

_DIVISION = re.compile(r"<(/?)div\b", re.IGNORECASE)


def read_html(file: File, reading: Reading) -> Iterator[Item]:
    """Yield the document of a page. The function `decode` chooses the charset."""
    data = read_whole(file, reading.max_bytes)
    if isinstance(data, Reject):
        yield data
        return
    decoded = decode(data, detect_encoding(data, from_html_meta=True) or "")
    if decoded is None:
        yield Reject("byte 0", "charset", "no charset fits the bytes of the page", excerpt(data))
        return
    markup, other = decoded
    title, text, is_fallback = extract_page(markup, reading.extraction)
    if text:
        notes = ["charset"] * other + ["fast extraction"] * is_fallback
        yield Text(text, 1, file.size, title=title, note=", ".join(notes))
    else:
        yield Skip("no main text" if extract(markup, main_content=False)[1] else "blank", 1)


def extract_page(markup: str, extraction: Extraction) -> tuple[str, str, bool]:
    """Return the title and the main text of a page, and whether the careful extraction failed and the fast one was used
    instead.
    """
    is_careful = extraction is Extraction.CAREFUL
    text = extract_carefully(markup) if is_careful and _depth(markup) <= MAX_DEPTH else None
    if text is not None:
        return extract(markup, main_content=False)[0], text, False
    return *extract(markup, main_content=True), is_careful


def extract(markup: str, *, main_content: bool) -> tuple[str, str]:
    """Return the title and the text of a page, with blank lines between paragraphs.

    If `main_content` is true, menus and everything else that surrounds the main text are left out.
    """
    tree = HTMLTree.parse(markup)
    if main_content and _depth(markup) <= MAX_DEPTH:
        text = find_main_text(tree, markup)
    else:
        text = extract_plain_text(tree, main_content=False, alt_texts=False).strip()
    return " ".join((tree.title or "").split()), text


def _depth(markup: str) -> int:
    if markup.lower().count("<div") <= MAX_DEPTH:  # to count is much faster than to follow the nesting
        return 0
    steps = (-1 if division[1] else 1 for division in _DIVISION.finditer(markup))
    return max(accumulate(steps), default=0)
