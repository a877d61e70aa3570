"""Show the text of links, and remove files, categories and links to the same article in other languages."""

import re

from crosscut.corpus.readers.wikitext.markup import GAP, match
from crosscut.corpus.readers.wikitext.wiki import Wiki, language_codes

_BRACKETS = re.compile(r"\[\[|\]\]")
_EXTERNAL = re.compile(
    r"\[(?:(?:https?|ftps?|irc|news|mailto|gopher|sftp|tel):|//)[^\s\[\]<>\"]*+([^\[\]\n]*+)\]", re.IGNORECASE
)
_SISTERS = frozenset((
    "w", "wikipedia", "wikt", "wiktionary", "s", "wikisource", "c", "commons", "q", "wikiquote", "b", "wikibooks",
    "n", "wikinews", "v", "wikiversity", "voy", "wikivoyage", "d", "wikidata", "m", "meta", "species", "wikispecies",
))  # fmt: skip
"""Prefixes of links to other wikis of Wikimedia."""

_DISAMBIGUATION = re.compile(r"(?<! ) *+\([^()]*\)$|, .*$")

MAX_DEPTH = 20
"""Maximum nesting of links. Links are nested only in the captions of files."""


def show_links(markup: str, wiki: Wiki) -> str:
    """Replace each link with its text. A link to a file or a category shows nothing.

    Links to other sites are replaced both before and after links to pages of a wiki, because each kind of link may
    contain the other.
    """
    text = _show_external(markup)
    if "[[" in text or "]]" in text:
        text = _Links(text, match(text, _BRACKETS), wiki).show(0, len(text)).replace("]]", "")
    return _show_external(text)


def _show_external(markup: str) -> str:
    return _EXTERNAL.sub(lambda found: found[1].strip() or GAP, markup) if "[" in markup else markup


class _Links:
    """The links of a page. `ends` maps the start of each link to its end."""

    def __init__(self, markup: str, ends: dict[int, int], wiki: Wiki) -> None:
        self._text = markup
        self._ends = ends
        self._wiki = wiki
        self._depth = 0

    def show(self, start: int, end: int) -> str:
        """Return the markup from `start` to `end`, with each link replaced by its text."""
        text = self._text
        pieces = []
        position = start
        while (at := text.find("[[", position, end)) >= 0:
            pieces.append(text[position:at])
            stop = self._ends.get(at)
            if stop is None or stop > end:
                position = at + 2  # these brackets are never closed
            else:
                pieces.append(self._link(at + 2, stop - 2))
                position = stop
        pieces.append(text[position:end])
        return "".join(pieces)

    def _link(self, start: int, end: int) -> str:
        """Text to show for a link. The markup from `start` to `end` is the content of its brackets."""
        bar = self._text.find("|", start, end)
        target = self._text[start : bar if bar >= 0 else end].strip()
        if "\n" in target or self._depth > MAX_DEPTH:
            return ""
        plain = target.startswith(":")  # [[:File:A.jpg|text]] is a link to the page of a file
        space, colon, rest = target.removeprefix(":").partition(":")
        name = space.replace("_", " ").strip().lower()
        if colon and name in self._wiki.unseen and not plain:
            return GAP
        if bar >= 0:
            self._depth += 1
            text = self.show(bar + 1, end)
            self._depth -= 1
            return text.strip(" ") if text.strip() else _pipe_trick(rest or target)
        if not colon:
            return target
        if name in self._wiki.unseen or name in self._wiki.spaces or (space in language_codes() and not plain):
            return GAP
        return rest.strip() if name in _SISTERS else target.removeprefix(":")


def _pipe_trick(title: str) -> str:
    """Text of a link like [[Paris (mythology)|]]: the title without a part in brackets or after a comma."""
    return _DISAMBIGUATION.sub("", title)
