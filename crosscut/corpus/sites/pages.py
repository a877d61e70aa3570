"""Find the pages among the documents, the folders of their sites, and the lines at both ends of their texts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from crosscut.config.corpora import SourceConfig, SourceFormat
from crosscut.corpus.documents import INGEST, Part, read_columns
from crosscut.corpus.filters.urls import canonical_url
from crosscut.corpus.readers.files import COMPRESSIONS, SUFFIXES

EDGE_LINES = 20
"""Number of lines at the beginning and at the end of a page among which boilerplate is searched, without empty
lines."""

MAX_FOLDERS = 6
"""Maximum number of folders of a page, from the top of its site."""

_FORMATS = (SourceFormat.HTML, SourceFormat.WARC, SourceFormat.WET)
_SUFFIXES = "|".join(re.escape(suffix) for kind in _FORMATS for suffix in SUFFIXES[kind])
_PAGE = re.compile(rf"(?:{_SUFFIXES})(?:{'|'.join(map(re.escape, COMPRESSIONS))})?(?:~[0-9]+)?#[^#]*$", re.IGNORECASE)
"""End of the id of a document from a file with a suffix of `_FORMATS`."""


_LINE = re.compile(r"[^\s](?:[^\n]*[^\s])?")
"""A line without the white space around it."""


class Page(NamedTuple):
    """A page of a site."""

    row: int
    """Row of the document in its part, from 0."""

    folders: tuple[int, ...]
    """Hashes of the folders that contain the page. The first is the site."""

    text: str


@dataclass(frozen=True)
class PageFinder:
    """Finder of the pages in a part. Pages are the documents of `html`, `warc` and `wet` sources, and those documents
    of `auto` sources whose files have such a suffix.
    """

    formats: tuple[tuple[str, SourceFormat], ...]
    """Name and format of each source."""

    @classmethod
    def of(cls, sources: Sequence[SourceConfig]) -> PageFinder | None:
        """Create the finder for a corpus. None if no source can have pages."""
        formats = tuple((source.name, source.format) for source in sources)
        return cls(formats) if {kind for _, kind in formats} & {*_FORMATS, SourceFormat.AUTO} else None

    def find(self, part: Part) -> list[Page]:
        """Find the pages of a part, in the order of their rows. No text is read if the part has no page."""
        rows = part.rows()
        table = read_columns(part.work / INGEST / f"{part.name}.arrow", "id", "url").take(rows)
        names = table["id"].to_pylist()
        kinds = dict(self.formats)
        is_page = np.array([_is_page(name, kinds[name.partition("/")[0]]) for name in names], dtype=bool)
        if not is_page.any():
            return []
        urls = table["url"].to_pylist()
        folders = [folders_of(names[place], urls[place]) for place in np.flatnonzero(is_page).tolist()]
        return list(map(Page, rows[is_page].tolist(), folders, part.texts(rows[is_page])))


def _is_page(document_id: str, kind: SourceFormat) -> bool:
    return kind in _FORMATS or (kind is SourceFormat.AUTO and bool(_PAGE.search(document_id)))


def folders_of(document_id: str, url: str) -> tuple[int, ...]:
    """Hash the folders that contain a page: the beginnings of its URL or, without a URL, of the name of its file.

    The page `https://example.com/book/install.html` is in `example.com` and in `example.com/book`.
    """
    path = canonical_url(url).partition("?")[0] if url else document_id.rpartition("#")[0]
    first, *inner = path.split("/")
    names = accumulate([first, *inner[:-1]][:MAX_FOLDERS], lambda folder, name: f"{folder}/{name}")
    return tuple(map(_hash_folder, names))


def edge_lines(text: str) -> list[tuple[int, int]]:
    """Start and end of the lines near both ends of a text, in order. Empty lines are left out."""
    lines = [(line.start(), line.end()) for line in _LINE.finditer(text)]
    return lines if len(lines) <= 2 * EDGE_LINES else lines[:EDGE_LINES] + lines[-EDGE_LINES:]


def hash_line(line: str) -> int:
    """Hash a line. Differences in white space do not matter."""
    return _hash(" ".join(line.split()))


@lru_cache(maxsize=1 << 16)
def _hash_folder(folder: str) -> int:
    return _hash(folder)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
