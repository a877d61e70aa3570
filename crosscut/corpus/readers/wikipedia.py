"""Read XML dumps of Wikipedia or any other MediaWiki. Each article is a document.

`dumps` reads the XML, and `wikitext.prose` turns the markup of a page into prose. Redirects and pages that are not
articles are skipped. Parts of a page that are not prose are removed: tables, references, files, categories, lists of
links at the end, and templates that carry no words.
"""

import re
from collections.abc import Iterator
from functools import partial

from crosscut.corpus.readers.dumps import EXCERPT, DumpPage, Pages
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, Skip, unless_blank, within_budget
from crosscut.corpus.readers.steps import TOO_COMPLEX, TooComplexError
from crosscut.corpus.readers.wikitext.prose import prose
from crosscut.corpus.readers.wikitext.wiki import ARTICLES
from crosscut.data.text.records import Reject, broken_off, excerpt, too_long
from crosscut.data.text.sources import BrokenOffError

_REDIRECT = re.compile(r"\s*#\w+\s*:?\s*\[\[")
_MODELS = ("", "wikitext")
"""Content models of pages that hold markup. Pages of other models hold data or code."""


def read_wikipedia(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the articles of a dump. Each page is a record. If a page has several revisions, the last is used."""
    pages = Pages(reading.max_bytes)
    position = 0
    try:
        for chunk, position in file.chunks():
            for page in pages.feed(chunk):
                start = page.pieces[0] if page.pieces else ""
                read = partial(_read_page, page, pages, reading.max_bytes, position)
                size = min(page.length, reading.max_bytes)
                yield within_budget(file.watch, f"page {page.number}", start, read, size=size)
    except BrokenOffError as error:
        yield broken_off(file.size, error, f"page {pages.first_lost}")
        return
    problem = pages.close()
    if problem:
        place = f"page {pages.first_lost}"
        reason = f"{place} and everything after it cannot be read: {problem}"
        yield Reject(place, "not a MediaWiki dump", reason, lost=max(file.size - position, 1))


def _read_page(page: DumpPage, pages: Pages, max_bytes: int, position: int) -> Item:
    place = f"page {page.number}"
    if page.problem:
        return Reject(place, "broken XML", f"the page cannot be read: {page.problem}", excerpt(page.markup))
    if page.namespace != ARTICLES or page.model not in _MODELS:
        return Skip("no article", page.number)
    if page.is_redirect or _REDIRECT.match(page.markup[:EXCERPT]):
        return Skip("redirect", page.number)
    if page.length > max_bytes:
        return too_long(place, "the page", page.markup[:EXCERPT], max_bytes)
    try:
        text = prose(page.markup, pages.wiki, page.title)
    except TooComplexError as error:
        return Reject(place, TOO_COMPLEX, f"the page's markup cannot be read: {error}", excerpt(page.markup))
    except (ArithmeticError, RecursionError, ValueError) as error:
        reason = f"the page's markup cannot be read: {type(error).__name__}: {error}"
        return Reject(place, "unreadable markup", reason, excerpt(page.markup))
    note = "" if pages.has_site else "no siteinfo"
    url = pages.wiki.url(page.title)
    return unless_blank(RawText(text, page.number, position, url=url, title=page.title, note=note))
