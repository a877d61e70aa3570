"""Facts about the wiki of a dump: its language, its URLs, and the words that mark parts of a page.

The words are in `crosscut/corpus/lists/wikipedia.toml`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

WORDS = Path(__file__).parents[2] / "lists" / "wikipedia.toml"

ARTICLES, FILES, CATEGORIES, MEDIA = 0, 6, 14, -2
"""MediaWiki's numbers of four namespaces: articles, pages about files, categories, and links that lead directly to a
file."""

_ENGLISH = ("en", "simple", "sco")
"""Languages of wikis whose templates write English."""


@cache
def read_words() -> dict[str, Any]:
    """Read the words of all languages."""
    return tomllib.loads(WORDS.read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Wiki:
    """Facts about one wiki."""

    language: str = "en"
    """Code of the language, such as `en`."""

    base: str = ""
    """Beginning of the URLs of articles, up to the slash before the title. Empty if the dump does not name it."""

    unseen: frozenset[str] = field(default_factory=lambda: _names("en", {}, (FILES, CATEGORIES, MEDIA)))
    """Names, in lower case, of the namespaces of files and categories. A link into one of these namespaces shows no
    text."""

    spaces: frozenset[str] = frozenset()
    """Names, in lower case, of the other namespaces that hold no articles, such as `portal`."""

    @classmethod
    def of(cls, language: str, base: str = "", namespaces: Mapping[str, int] | None = None) -> "Wiki":
        """Describe a wiki. `namespaces` maps the names of a dump's namespaces (`<siteinfo>`) to MediaWiki's numbers."""
        found = namespaces or {}
        unseen = _names(language, found, (FILES, CATEGORIES, MEDIA))
        others = {name.lower() for name, number in found.items() if name and number != ARTICLES}
        return cls(language=language, base=base, unseen=unseen, spaces=frozenset(others) - unseen)

    @property
    def is_english(self) -> bool:
        """Whether the templates of the wiki write English."""
        return self.language in _ENGLISH

    def url(self, title: str) -> str:
        """URL of an article. Empty if the dump does not name the wiki's URL."""
        return f"{self.base}/{quote(title.replace(' ', '_'), safe='/:(),!*')}" if self.base else ""

    def is_end(self, title: str, level: int) -> bool:
        """Return whether a heading begins a section of notes, sources or links. `level` is its number of `=` signs."""
        ends, chapters, between = _sections(self.language)
        known = ends | chapters if level <= 2 else ends
        name = " ".join(title.lower().strip(" \t.:").split())
        return name in known or all(part.strip() in known for part in between.split(name))


def _names(language: str, found: Mapping[str, int], numbers: tuple[int, ...]) -> frozenset[str]:
    words = read_words()
    known = [name for code in {"en", language} & words.keys() for name in _of_files(words[code])]
    return frozenset(name.lower() for name in (*known, *(name for name in found if found[name] in numbers)))


def _of_files(words: Mapping[str, list[str]]) -> list[str]:
    return [*words["files"], *words["categories"]]


@cache
def _sections(language: str) -> tuple[frozenset[str], frozenset[str], re.Pattern[str]]:
    """Return the titles of end sections, the titles that count as end sections only up to level 2, and a pattern for
    the separators of two titles in one heading.
    """
    words = read_words()
    tables = [words[code] for code in ("en", language) if code in words]
    ends = frozenset(title.lower() for table in tables for title in table["end"])
    chapters = frozenset(title.lower() for table in tables for title in table.get("chapters", ()))
    joints = [re.escape(word) for table in tables for word in table.get("and", ())]
    spaced = rf"\s+(?:{'|'.join(joints)})\s+|\s*[,/;]\s*"
    unspaced = [joint for joint in joints if not joint.isascii() and language in ("ja", "zh")]
    return ends, chapters, re.compile("|".join([spaced, *unspaced]))


@cache
def language_codes() -> frozenset[str]:
    """Prefixes of links to the same article in other languages."""
    return frozenset(read_words()["codes"].split())
