"""Read the pages of a MediaWiki XML dump in a stream, with Expat.

A dump has one `<mediawiki>` element, which holds a description of the wiki (`<siteinfo>`) and the pages (`<page>`). If
the XML is broken, the page in which it breaks is lost, and reading continues at the next `<page>`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from crosscut.corpus.readers.wikitext.wiki import ARTICLES, Wiki

EXCERPT = 1000
"""Number of characters that are kept of a page that is too long."""

MAX_TAG_BYTES = 1 << 20
"""Maximum length of a tag or a comment. Expat reads an incomplete tag again with every chunk."""

MAX_DEPTH = 100
"""Maximum nesting of elements."""

_PAGE = b"<page>"
_ROOT = b"<mediawiki>"
_JUNK = expat.errors.codes[expat.errors.XML_ERROR_JUNK_AFTER_DOC_ELEMENT]
_OF_PAGE = ("title", "ns")
_OF_SITE = ("base", "dbname", "namespace")


@dataclass
class DumpPage:
    """A page of a dump, with its markup as stored in the dump."""

    number: int
    """Number of the page in the dump, from 1."""
    title: str = ""
    namespace: int | None = None
    is_redirect: bool = False
    model: str = ""
    """Content model of the last revision. Empty in old dumps."""
    pieces: list[str] = field(default_factory=list)
    length: int = 0
    """Number of characters of the last revision. If it exceeds the maximum, `pieces` holds only the beginning."""
    problem: str = ""
    """Error in the XML of the page. Empty if the page was read."""

    @property
    def markup(self) -> str:
        """Markup of the last revision."""
        return "".join(self.pieces)


class _UnclosedError(Exception):
    """Error for a page that begins before the previous page has ended."""

    def __init__(self, place: int) -> None:
        super().__init__("the page has no end")
        self.place = place
        """Offset of the page that begins, in bytes of the parsed XML."""


class _NoDumpError(Exception):
    """Error for XML that cannot be a dump."""


class Pages:
    """Parser for the pages of a dump, which is fed in chunks. A page of more than `max_length` characters is not kept
    in memory.
    """

    def __init__(self, max_length: int) -> None:
        self.number = 0
        """Number of pages that have begun."""
        self.has_site = False
        """Whether the dump describes its wiki."""
        self.wiki = Wiki.of("en")
        self._max_length = max_length
        self._site = {"language": "", "base": "", "dbname": ""}
        self._namespaces: dict[str, int] = {}
        self._found: list[DumpPage] = []
        self._page: DumpPage | None = None
        self._broken: DumpPage | None = None
        """Page with broken XML. Set while the parser searches for the next page."""
        self._tail = b""
        self._start_parser()

    @property
    def first_lost(self) -> int:
        """Number of the first page that is lost if the dump ends here."""
        page = self._broken or self._page
        return page.number if page else self.number + 1

    def feed(self, chunk: bytes) -> Iterator[DumpPage]:
        """Read a chunk, and yield the pages that end in it."""
        while chunk:
            if self._broken:
                chunk = self._find_page(chunk)
            if chunk:
                chunk = self._parse(chunk)
            yield from self._found
            self._found.clear()

    def close(self) -> str:
        """End the dump. Returns the error that made the rest of the dump unreadable, or an empty string."""
        if self._broken:
            return self._broken.problem
        try:
            self._parser.Parse(b"", True)
        except (expat.ExpatError, _UnclosedError, _NoDumpError) as error:
            return str(error)
        return "" if self.number or self.has_site else "it has neither <siteinfo> nor <page>"

    def _start_parser(self) -> None:
        self._fed = 0
        self._path: list[str] = []
        self._name = ""
        self._texts: list[str] = []
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.buffer_size = 1 << 18
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._add
        self._parser.StartDoctypeDeclHandler = self._refuse

    def _parse(self, chunk: bytes) -> bytes:
        """Parse a chunk. If the XML breaks, return the part of the chunk that remains to be read. Otherwise, return no
        bytes.
        """
        try:
            self._parser.Parse(chunk, False)
        except expat.ExpatError as error:
            place = max(self._parser.ErrorByteIndex - self._fed, 0)
            if error.code == _JUNK and self._fed + place and not self._page:  # another dump follows in the same file
                self._start_parser()
            else:
                self._break(str(error))
            return chunk[place:]
        except _UnclosedError as error:
            self._break(str(error))
            self._tail = _PAGE[: max(self._fed - error.place, 0)]  # the tag of the page may begin in the previous chunk
            return chunk[max(error.place - self._fed, 0) :]
        except _NoDumpError as error:
            self._break(str(error))
            return b""
        self._fed += len(chunk)
        if self._fed - self._parser.CurrentByteIndex > MAX_TAG_BYTES:
            self._break(f"a tag or a comment is longer than {MAX_TAG_BYTES >> 20} MB")
        return b""

    def _break(self, problem: str) -> None:
        """Mark the current page as the page in which the XML is broken."""
        self._broken = self._page or DumpPage(self.number + 1)
        self._broken.problem = problem
        self._page = None
        self._tail = b""

    def _find_page(self, chunk: bytes) -> bytes:
        """Search for the next page after broken XML, and start a parser for it. Returns the chunk from the start of
        that page on, or no bytes if the chunk has no page.
        """
        searched = self._tail + chunk
        place = searched.find(_PAGE)
        if place < 0:
            self._tail = searched[1 - len(_PAGE) :]
            return b""
        if self._broken:
            self._found.append(self._broken)
            self._broken = None
        self._start_parser()
        self._parser.Parse(_ROOT, False)
        self._fed = len(_ROOT)
        return searched[place:]

    def _refuse(self, *_: object) -> None:
        raise _NoDumpError("it has a document type, which dumps do not have")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._path[-1] if self._path else ""
        if len(self._path) == MAX_DEPTH:
            raise _NoDumpError(f"elements are nested more than {MAX_DEPTH} levels deep")
        self._path.append(name)
        self._name = ""
        if name == "page":
            self._start_page()
        elif name == "redirect" and self._page:
            self._page.is_redirect = True
        elif name == "mediawiki":
            self._site["language"] = attributes.get("xml:lang", "")
        elif name == "text" and parent == "revision" and self._page:
            self._page.pieces, self._page.length = [], 0
            self._name = name
        elif (name == "model" and parent == "revision") or name in (_OF_PAGE if parent == "page" else _OF_SITE):
            self._name, self._texts = name, []
            self._key = attributes.get("key", "")

    def _start_page(self) -> None:
        if self._page:
            raise _UnclosedError(self._parser.CurrentByteIndex)
        if not self.number and not self.has_site:
            self.wiki = Wiki.of(self._site["language"] or "en")
        self.number += 1
        self._page = DumpPage(self.number)

    def _add(self, text: str) -> None:
        """Collect text of the element that is being read."""
        if self._name == "text" and self._page:
            page = self._page
            if page.length <= self._max_length:
                page.pieces.append(text)
            elif page.length > self._max_length and len(page.pieces) > 1:
                page.pieces = [page.markup[:EXCERPT]]
            page.length += len(text)
        elif self._name and len(self._texts) < EXCERPT:
            self._texts.append(text[:EXCERPT])

    def _end(self, name: str) -> None:
        self._path.pop()
        text = "".join(self._texts).strip() if self._name == name else ""
        page = self._page
        if self._name == name != "text":
            self._keep(name, text, page)
        self._name = ""
        if name == "page" and page:
            page.namespace = self._namespace(page)
            self._found.append(page)
            self._page = None
        elif name == "siteinfo":
            self.has_site = True
            language = self._site["language"] or self._site["dbname"].removesuffix("wiki").replace("_", "-") or "en"
            self.wiki = Wiki.of(language, self._site["base"].rpartition("/")[0], self._namespaces)

    def _keep(self, name: str, text: str, page: DumpPage | None) -> None:
        """Store a fact about the page or the wiki."""
        if name == "namespace":
            self._namespaces[text] = _number(self._key, ARTICLES)
        elif name in self._site:
            self._site[name] = text
        elif page and name == "title":
            page.title = text.replace("_", " ")
        elif page and name == "ns":
            page.namespace = _number(text, ARTICLES)
        elif page and name == "model":
            page.model = text

    def _namespace(self, page: DumpPage) -> int:
        """Number of a page's namespace. In old dumps, only the beginning of the title tells the namespace."""
        if page.namespace is not None:
            return page.namespace
        return self._namespaces.get(page.title.partition(":")[0], ARTICLES) if ":" in page.title else ARTICLES


def _number(text: str, default: int) -> int:
    return int(text) if text.removeprefix("-").isdecimal() else default
