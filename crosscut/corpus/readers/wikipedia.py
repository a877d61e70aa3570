"""Read XML dumps of Wikipedia or any other MediaWiki. Each article is a document.

The library mwxml reads the dump, and mwparserfromhell reads the markup. Redirects and pages that are not articles are
skipped. Parts of a page that are not prose are removed: templates, tables, references, files, categories, and lists of
links at the end.
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
from crosscut.data.text.sources import BrokenOffError

ARTICLES = 0
"""Number of the MediaWiki namespace that contains the articles."""

_NO_PROSE = frozenset(
    {"see also", "references", "external links", "further reading", "notes", "bibliography", "sources"}
)
_NO_PROSE_TAGS = frozenset({"ref", "table", "gallery", "math", "timeline", "score", "syntaxhighlight"})
_NO_ARTICLES = frozenset({"file", "image", "media", "category"})
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_BLANK_LINES = re.compile(r"\n\s*\n+")
_QUOTES = re.compile(r"'{2,5}")  # bold and italic
_EMPTY_BRACKETS = re.compile(r" ?\(\s*[,;]?\s*\)")


def read_wikipedia(file: File, reading: Reading) -> Iterator[Item]:
    """Yield the articles of a dump. Each page is a record. If a page has several revisions, the last is used."""
    stream = _Stream(file)
    number = 0
    try:
        root = ElementIterator.from_file(stream)
        dump = mwxml.Dump.from_element(root)
        site = _Site.of(dump)
        for number, page in enumerate(dump.pages, start=1):
            yield _read_page(page, reading, site, number, stream.position)
            root.element.clear()  # otherwise the root would keep an empty element for each page
    except BrokenOffError as error:
        yield broken_off(file, error, f"page {number + 1}")
    except DataError:
        raise
    except Exception as error:  # mwxml raises many kinds of errors for a damaged dump or a page without id or time
        reason = f"page {number + 1} and everything after it cannot be read: {str(error) or type(error).__name__}"
        yield Reject(f"page {number + 1}", "not a MediaWiki dump", reason, lost=max(file.size - stream.position, 1))


class _Stream(io.RawIOBase):
    """A readable stream of a file's unpacked bytes."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._chunks = file.chunks()
        self._left = memoryview(b"")
        self.position = 0
        """Bytes on disk that were read so far."""

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
    """Facts about the wiki of a dump: the base URL, and the namespaces whose pages are not articles."""

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
        return Reject(
            f"page {number}", "unreadable markup", f"the page's markup cannot be read: {error}", excerpt(markup)
        )
    if not text:
        return Skip("blank")
    return Text(text, number, position, url=site.url(page.title), title=page.title)


def prose(markup: str, namespaces: frozenset[str] = _NO_ARTICLES) -> str:
    """Extract the prose of a page's markup. Each heading is a separate line.

    `namespaces` are names, in lower case, of namespaces such as `file` and `category`. Links into these namespaces show
    files or set categories, and are removed.
    """
    code = mwparserfromhell.parse(markup, skip_style_tags=True)
    kept = Wikicode([node for node in _sections(code) if not _is_no_prose(node, namespaces)])
    text = kept.strip_code(normalize=True, collapse=False)
    text = _EMPTY_BRACKETS.sub("", _QUOTES.sub("", text))  # a removed pronunciation template leaves empty brackets
    return _BLANK_LINES.sub("\n\n", "\n".join(" ".join(line.split()) for line in text.splitlines())).strip()


def _sections(code: Wikicode) -> Iterator[Any]:
    """Yield the nodes of a page, without the sections that hold no prose."""
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
    # A link that begins with a colon is an ordinary link to a file or category, and its text is prose.
    space, colon, _ = str(node.title).partition(":")
    return bool(colon) and (
        space.strip().lower() in namespaces or bool(node.text is None and _LANGUAGE.fullmatch(space))
    )
