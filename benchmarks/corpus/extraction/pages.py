"""List of the pages of the benchmark, from `pages.json`: the package that each page comes from, its hash, its half.

The pages are divided into two halves by site: no site has pages in both halves. The half `work` is for improving the
extraction. The half `held` is only for measuring it.

`expected.json` has strings that the extracted text of each page must contain, and strings that it must not contain.
The strings were written by reading the pages, before any extractor had run on them. For the pages of ten languages that
were added later, the blocks of visible text were read and chosen, and a few words of each block are the string.
"""

import json
from dataclasses import dataclass
from pathlib import Path

PAGES_FILE = Path(__file__).with_name("pages.json")
EXPECTED_FILE = Path(__file__).with_name("expected.json")
HALVES = ("work", "held")
REGISTRIES = ("pypi", "npm", "debian")


@dataclass(frozen=True, kw_only=True)
class Page:
    """One HTML page that is a file in an archive of a package registry."""

    id: str
    """Short unique name. It never changes, because expected texts refer to it."""
    registry: str
    """One of `REGISTRIES`."""
    package: str
    version: str
    archive: str
    """File name of the archive, as the registry's client saves it."""
    path: str
    """Path of the page inside the archive."""
    sha256: str
    """SHA-256 of the bytes of the page, in hexadecimal."""
    site: str
    """Web site, or manual with its own generator, that the page comes from."""
    kind: str
    """Kind of page, such as `news article`, `forum` or `documentation`."""
    language: str
    """Language of the main text, as an ISO 639-1 code."""
    half: str
    """One of `HALVES`."""


def read_pages(file: Path = PAGES_FILE) -> list[Page]:
    """Return all pages, in the order of the file."""
    return [Page(**page) for page in json.loads(file.read_text(encoding="utf-8"))]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Strings by which the extracted text of one page is judged. Each occurs once in the text of the page."""

    id: str
    """The page's id."""
    keep: list[str]
    """Strings of the main text, from its beginning to its end."""
    drop: list[str]
    """Strings of menus, sidebars, related articles, comments of readers, footers and the like; may be empty."""


def read_expected(file: Path = EXPECTED_FILE) -> dict[str, Expected]:
    """Return the expected strings of all pages, by the page's id."""
    return {one["id"]: Expected(**one) for one in json.loads(file.read_text(encoding="utf-8"))}
