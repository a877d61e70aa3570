"""An XML dump of Wikipedia, or of any MediaWiki: an article is a document.

mwxml reads the dump and mwparserfromhell its markup. Redirects, pages that are no articles, and what of a page is no
prose (templates, tables, references, files, categories, lists of links at the end) are left out.
"""

import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import mwparserfromhell
import mwxml
from mwparserfromhell.nodes import Heading, Tag, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode
from mwxml.element_iterator import ElementIterator

from crosscut.config.errors import DataError
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.lines import broken_off
from crosscut.corpus.readers.record import Item, Reading, Reject, Skip, Text, excerpt, too_long
from crosscut.data.sources import DamagedError

ARTICLES = 0
"""The namespace of articles."""

_NO_PROSE = frozenset(
    {"see also", "references", "external links", "further reading", "notes", "bibliography", "sources"}
)
_NO_PROSE_TAGS = frozenset({"ref", "table", "gallery", "math", "timeline", "score", "syntaxhighlight"})
_NO_ARTICLES = frozenset({"file", "image", "media", "category"})
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_BLANK_LINES = re.compile(r"\n\s*\n+")
_QUOTES = re.compile(r"'{2,5}")  # bold and slanted
_EMPTY_BRACKETS = re.compile(r" ?\(\s*[,;]?\s*\)")


def read_wikipedia(file: File, reading: Reading) -> Iterator[Item]:
    """The articles of a dump, a record for each page; of a page with several revisions, the last."""
    stream = _Stream(file)
    number = 0
    try:
        root = ElementIterator.from_file(stream)
        dump = mwxml.Dump.from_element(root)
        site = _Site.of(dump)
        for number, page in enumerate(dump.pages, start=1):
            yield _read_page(page, reading, site, number, stream.position)
            root.element.clear()  # it would keep an empty element for each page
    except DamagedError as error:
        yield broken_off(file, error, f"page {number + 1}")
    except DataError:
        raise
    except Exception as error:  # mwxml stumbles in many ways over what is no dump, or a page without an id or a time
        reason = f"page {number + 1} and all after it cannot be read: {str(error) or type(error).__name__}"
        yield Reject(f"page {number + 1}", "no MediaWiki dump", reason, lost=max(file.size - stream.position, 1))


class _Stream(io.RawIOBase):
    """A file's unpacked bytes as a file to read from."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._chunks = file.chunks()
        self._left = memoryview(b"")
        self.position = 0
        """Bytes on disk that were read."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk, self.position = next(self._chunks, (None, self.position))
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)


class _Site(NamedTuple):
    """What a dump says of itself."""

    base: str
    namespaces: frozenset[str]

    @classmethod
    def of(cls, dump: mwxml.Dump) -> "_Site":
        names = {space.name.lower() for space in dump.site_info.namespaces or () if space.name and space.id > ARTICLES}
        return cls((dump.site_info.base or "").rpartition("/")[0], _NO_ARTICLES | names)

    def url(self, title: str) -> str:
        return f"{self.base}/{quote(title.replace(' ', '_'), safe='/:(),!*')}" if self.base else ""


def _read_page(page: Any, reading: Reading, site: _Site, number: int, position: int) -> Item:
    markup = ""
    for revision in page:
        markup = revision.text or ""
    if page.namespace != ARTICLES:
        return Skip("no article")
    if page.redirect:
        return Skip("redirect")
    if len(markup) > reading.max_bytes:
        return too_long(f"page {number}", "the page", markup[:1000], reading.max_bytes)
    try:
        text = prose(markup, site.namespaces)
    except (ParserError, RecursionError) as error:
        return Reject(f"page {number}", "no markup", f"the page's markup cannot be read: {error}", excerpt(markup))
    if not text:
        return Skip("blank")
    return Text(text, number, position, url=site.url(page.title), title=page.title)


def prose(markup: str, namespaces: frozenset[str] = _NO_ARTICLES) -> str:
    """The prose of a page's markup, its headings as lines of their own.

    Links to pages of `namespaces`, in lower case, show files and set categories.
    """
    code = mwparserfromhell.parse(markup, skip_style_tags=True)
    kept = Wikicode([node for node in _sections(code) if not _is_no_prose(node, namespaces)])
    text = kept.strip_code(normalize=True, collapse=False)
    text = _EMPTY_BRACKETS.sub("", _QUOTES.sub("", text))  # what a template leaves that gave a pronunciation
    return _BLANK_LINES.sub("\n\n", "\n".join(" ".join(line.split()) for line in text.splitlines())).strip()


def _sections(code: Wikicode) -> Iterator[Any]:
    """The nodes of a page without those of the sections that hold no prose."""
    within = 0
    for node in code.nodes:
        if isinstance(node, Heading) and (not within or node.level <= within):
            within = node.level if str(node.title).strip().lower() in _NO_PROSE else 0
        if not within:
            yield node


def _is_no_prose(node: Any, namespaces: frozenset[str]) -> bool:
    if isinstance(node, Tag):
        return str(node.tag).strip().lower() in _NO_PROSE_TAGS
    if not isinstance(node, Wikilink):
        return False
    # What shows a link to a file or a category, and does not put the article there, begins with a colon.
    space, colon, _ = str(node.title).partition(":")
    return bool(colon) and (
        space.strip().lower() in namespaces or bool(node.text is None and _LANGUAGE.fullmatch(space))
    )
