"""Remove tags from HTML that the parser or the search for the main text could not handle in bounded time and memory.

A broken page can open a tag 100,000 times and never close it. Four costs then grow with the square of the page size:

- the time of the search for the main text, if `<div>` or `<article>` elements are nested;
- the time of the parser, if elements of most other kinds are nested (in `<ol>`, the text itself also grows in this way,
  because each level is indented);
- the memory of the parser, if formatting tags such as `<font>` are not closed, because every following block opens them
  again;
- the time of the parser, if a `<select>` has many options.

The tags that cause the last three costs carry no text, so they are removed. All limits count tags and their depth, so a
page is treated alike on every machine. Pages below the limits are unchanged. Tags of few characters that fill a whole
page take more than 100 times its size in memory, however they are nested, so there is a limit on their number, too.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

from crosscut.corpus.readers.steps import TooComplexError

MAX_DEPTH = 1000
"""Maximum nesting depth of one kind of element. Browsers support half of this depth."""

MAX_STEPS, MAX_STEPS_PER_CHARACTER = 4_000_000, 8
"""Maximum number of tags times the nesting depth of one kind of element: for each page, and for each of its characters.
The time of the parser and of the search for the main text, and the indentation of lists, grow with this product."""

MAX_KINDS = 8
"""Maximum of the same product for all kinds of elements together, as a multiple of the maximum for one kind."""

MAX_OPTIONS = 3000
"""Maximum number of options on a page. The parser compares each option of a `<select>` with all options before it."""

MAX_REOPENED = 1_000_000
"""Maximum number of formatting tags that the parser may have to open again."""

MAX_TAGS, CHARACTERS_PER_TAG = 500_000, 8
"""Maximum number of tags: on each page, and another for so many characters. The parser takes about 500 bytes of memory
for each tag. Large pages usually have a tag for every 30 characters."""

MAX_TAG_CHARACTERS, MAX_ATTRIBUTES = 50_000, 5_000
"""A tag that exceeds both limits loses its attributes, because the parser compares each attribute with all attributes
before it."""

_AT_ONCE = 1 << 20
"""Number of characters whose tags are listed at a time. A tag that is split between two such sections may be missed."""

_SEARCHED = frozenset({"div", "article"})
_ALL_FORMATTING = "formatting"
_FORMATTING = frozenset(
    ["a", "b", "big", "code", "em", "font", "i", "nobr", "s", "small", "strike", "strong", "tt", "u"]
)
_CLOSED_BY_THE_NEXT = frozenset(["p", "li", "dt", "dd", "option", "tr", "td", "th", "thead", "tbody", "tfoot"])
_EMPTY = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"]
)
_SHAPES = frozenset(["circle", "ellipse", "image", "line", "path", "polygon", "polyline", "rect", "stop", "use"])
"""Elements of drawings, which have no content and often no end tag."""
_UNNESTED = frozenset(["html", "head", "body"]) | _CLOSED_BY_THE_NEXT | _EMPTY
_OPTIONS = frozenset(["option", "optgroup"])
_INLINE = _FORMATTING | _SHAPES

_NAME = re.compile(r"<(/?[A-Za-z][^\s/>]*)")
_TAG = re.compile(r"</?([a-z][^\s/<>]*+)(?=[\s/>])[^<>]*>?", re.IGNORECASE)
_LONG_TAG = re.compile(rf"<([a-z][^\s/<>]*+)[^<>]{{{MAX_TAG_CHARACTERS},}}+>?", re.IGNORECASE)


class Markup(NamedTuple):
    """HTML that can be parsed in bounded time and memory."""

    text: str

    is_searchable: bool
    """Whether the main text can be searched in bounded time."""


def limit_nesting(markup: str) -> Markup:
    """Remove the tags that would take too much time or memory.

    Raises `TooComplexError` if the page has too many tags.
    """
    if _may_have_long_tag(markup):
        markup = _LONG_TAG.sub(_without_attributes, markup)
    if markup.count("<") <= 2 * MAX_DEPTH:
        return Markup(markup, is_searchable=True)
    pieces = _MarkupNames(markup)
    spelled = Counter(chain.from_iterable(pieces))
    opened: Counter[str] = Counter()
    for name, number in spelled.items():
        opened[name.lower()] += number
    num_tags, most = opened.total(), MAX_TAGS + len(markup) // CHARACTERS_PER_TAG
    if num_tags > most:
        raise TooComplexError(f"the page has {num_tags:,} tags, but at most {most:,} are read")
    limit = MAX_STEPS + MAX_STEPS_PER_CHARACTER * len(markup)
    removed = set(_OPTIONS) if opened["select"] and opened["option"] > MAX_OPTIONS else set()
    groups = _groups(opened, limit)
    depths = _depths(pieces, groups, spelled) if groups else Counter()
    deep = {name for name in depths if depths[name] > MAX_DEPTH or depths[name] * num_tags > limit}
    is_searchable = not deep & _SEARCHED
    if sum(depths[name] for name in depths.keys() - _SHAPES) * num_tags > MAX_KINDS * limit:
        deep, is_searchable = set(depths), False
    removed |= deep - _SEARCHED - {_ALL_FORMATTING}
    if depths[_ALL_FORMATTING] * num_tags > MAX_REOPENED:
        removed |= _FORMATTING
    if removed:
        markup = _TAG.sub(partial(_without, removed), markup)
    return Markup(markup, is_searchable)


def _groups(opened: Counter[str], limit: int) -> dict[str, str]:
    """Map the names of elements whose nesting may be too deep to their groups. `opened` counts the tags by name."""
    num_tags = opened.total()
    nested = {name for name in opened if name[0] != "/"} - _UNNESTED - _FORMATTING
    is_deep = sum(opened[name] for name in nested) * num_tags > limit
    groups = {name: name for name in nested if is_deep or opened[name] > MAX_DEPTH}
    if sum(opened[name] for name in _FORMATTING) * num_tags > MAX_REOPENED:
        groups |= dict.fromkeys(_FORMATTING, _ALL_FORMATTING)
    return groups


def _may_have_long_tag(markup: str) -> bool:
    """Whether a `<` is followed by `MAX_TAG_CHARACTERS` characters without another `<`. The function is fast, because
    it looks at only a few of the characters.
    """
    start = markup.find("<")
    while 0 <= start < len(markup) - MAX_TAG_CHARACTERS:
        last = markup.rfind("<", start + 1, start + 1 + MAX_TAG_CHARACTERS)
        if last < 0:
            return True
        start = last
    return False


class _MarkupNames:
    """Iterable of lists that together contain the names of all tags. The name of an end tag begins with a slash.

    Short markup has a single list, which is kept for the second iteration. The lists of long markup would take too much
    memory, so they are made again for each iteration.
    """

    def __init__(self, markup: str) -> None:
        self._markup = markup
        self._only = _NAME.findall(markup) if len(markup) <= _AT_ONCE else None

    def __iter__(self) -> Iterator[list[str]]:
        if self._only is not None:
            yield self._only
            return
        for start in range(0, len(self._markup), _AT_ONCE):
            yield _NAME.findall(self._markup[start : start + _AT_ONCE])


def _depths(pieces: _MarkupNames, groups: Mapping[str, str], spelled: Iterable[str]) -> Counter[str]:
    """For each group, find the maximum number of elements that are open at the same time. `groups` maps the names of
    elements to their groups, and `spelled` has all names of tags as the page spells them.
    """
    steps = {}
    for name in spelled:
        if group := groups.get(name.lower().removeprefix("/")):
            steps[name] = (group, -1 if name[0] == "/" else 1)
    now = dict.fromkeys(groups.values(), 0)
    deepest = now.copy()
    for names in pieces:
        for group, step in filter(None, map(steps.get, names)):
            depth = now[group] + step
            if depth >= 0:
                now[group] = depth
                if depth > deepest[group]:
                    deepest[group] = depth
    return Counter(deepest)


def _without(removed: set[str], tag: re.Match[str]) -> str:
    """Text that replaces a tag, if elements of some kinds are removed."""
    name = tag[1].lower()
    return tag[0] if name not in removed else "" if name in _INLINE else "\n"


def _without_attributes(tag: re.Match[str]) -> str:
    return f"<{tag[1]}>" if len(tag[0].split(maxsplit=MAX_ATTRIBUTES)) > MAX_ATTRIBUTES else tag[0]
