"""Find the documents that are web pages, the folders of the site that contain each page, and the lines at both ends of
its text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from crosscut.config.corpora import SourceConfig, SourceFormat
from crosscut.corpus.documents import INGEST, Document, Part, read_columns
from crosscut.corpus.filters.urls import canonical_url
from crosscut.corpus.readers.files import COMPRESSIONS, SUFFIXES

EDGE_LINES = 40
"""Number of lines at each end of a page that are searched for boilerplate. Empty lines are not counted."""

EDGE_CHARACTERS = 1 << 17
"""Maximum number of characters at each end of a page that are searched for boilerplate."""

MAX_LINE = 2000
"""Maximum length of a line of boilerplate in characters."""

MAX_FOLDERS, MAX_DEPTH = 6, 32
"""Maximum number of folders of a page (the site and the innermost folders), and maximum depth of a folder."""

_FORMATS = (SourceFormat.HTML, SourceFormat.WARC, SourceFormat.WET)
_SUFFIXES = "|".join(re.escape(suffix) for kind in _FORMATS for suffix in SUFFIXES[kind])
_PAGE = re.compile(rf"(?:{_SUFFIXES})(?:{'|'.join(map(re.escape, COMPRESSIONS))})?(?:~[0-9]+)?#[^#]*$", re.IGNORECASE)
"""Pattern for the end of a document's id, if the document comes from a file with a suffix of `_FORMATS`."""

_LINE = re.compile(r"[^\s](?:[^\n]*[^\s])?")
"""Pattern for a line without the white space around it."""


_WORD = re.compile(r"[^\W_][\W_]*[^\W_][\W_]*[^\W_]")


class SiteFolder(NamedTuple):
    """A folder that contains a page."""

    depth: int
    """Number of folders above this one. The site has depth 0."""

    hash: int


class SitePage(NamedTuple):
    """A page of a site."""

    row: int
    """Row of the document in its part, from 0."""

    folders: tuple[SiteFolder, ...]
    """The folders that contain the page. The first one is the site."""

    text: str


@dataclass(frozen=True)
class PageFinder:
    """Finder of pages. Pages are the documents of `html`, `warc` and `wet` sources, and those documents of `auto`
    sources whose file has a suffix of one of these formats.
    """

    formats: tuple[tuple[str, SourceFormat], ...]
    """Name and format of each source that may have pages."""

    @classmethod
    def of(cls, sources: Sequence[SourceConfig]) -> PageFinder | None:
        """Create the finder for a corpus. Returns None if no source can have pages."""
        formats = tuple((one.name, one.format) for one in sources if one.format in (*_FORMATS, SourceFormat.AUTO))
        return cls(formats) if formats else None

    @property
    def settings(self) -> list[list[str]]:
        """The formats, as JSON values."""
        return [[name, str(kind)] for name, kind in self.formats]

    def find(self, part: Part) -> list[SitePage]:
        """Find the pages of a part, in the order of their rows. No text is read if the part has no page."""
        kinds = dict(self.formats)
        has_pages = any(_is_page(name, kinds) for name in read_columns(part.file(INGEST), "id")["id"].to_pylist())
        return self.among(part.documents()) if has_pages else []

    def among(self, documents: Iterable[Document]) -> list[SitePage]:
        """Find the pages among documents that have been read."""
        kinds = dict(self.formats)
        found = (document for document in documents if _is_page(document.id, kinds))
        return [SitePage(one.row, folders_of(one.id, one.url), one.text) for one in found]


def _is_page(document_id: str, kinds: dict[str, SourceFormat]) -> bool:
    kind = kinds.get(document_id.partition("/")[0])
    return kind in _FORMATS or (kind is SourceFormat.AUTO and bool(_PAGE.search(document_id)))


def folders_of(document_id: str, url: str) -> tuple[SiteFolder, ...]:
    """Return the folders that contain a page: the leading parts of its URL or, if it has no URL, of its file name.

    The page `https://example.com/book/install.html` is in `example.com` and in `example.com/book`.
    """
    path = _path(canonical_url(url)) if url else document_id.rpartition("#")[0]
    names = path.split("/")
    is_folder = len(names) == 1 or (bool(url) and _path(url).endswith("/"))
    parents = (names if is_folder else names[:-1])[:MAX_DEPTH]
    all_of = list(enumerate(accumulate(parents, lambda folder, name: f"{folder}/{name}")))
    return tuple(
        SiteFolder(depth, _hash(name, b"folder")) for depth, name in [all_of[0], *all_of[1:][1 - MAX_FOLDERS :]]
    )


def _path(url: str) -> str:
    return url.partition("#")[0].partition("?")[0].strip()


def edge_lines(text: str) -> list[tuple[int, int]]:
    """Find the lines near both ends of a text, in order. Returns the start and end of each line that is not empty."""
    if len(text) <= 2 * EDGE_CHARACTERS:
        lines = [line.span() for line in _LINE.finditer(text)]
        return lines if len(lines) <= 2 * EDGE_LINES else lines[:EDGE_LINES] + lines[-EDGE_LINES:]
    first = [line.span() for line in islice(_LINE.finditer(text, 0, EDGE_CHARACTERS), EDGE_LINES)]
    whole = [line for line in first if line[1] < EDGE_CHARACTERS]  # not the first part of a line
    end = text.find("\n", len(text) - EDGE_CHARACTERS)
    last = [line.span() for line in _LINE.finditer(text, end)] if end >= 0 else []
    return whole + last[-EDGE_LINES:]


def hash_line(line: str) -> int:
    """Hash a line. Differences in white space do not matter. The result is 0 for a line that cannot be boilerplate: a
    line that is too long, or a line such as `}` with fewer than three letters and digits.
    """
    return _hash(" ".join(line.split()), b"line") if len(line) <= MAX_LINE and _WORD.search(line) else 0


def _hash(text: str, kind: bytes) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=kind).digest()
    return int.from_bytes(digest, "little")
