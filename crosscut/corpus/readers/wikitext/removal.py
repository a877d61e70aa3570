"""Remove the parts of a page that are never prose: comments, references, tables, and sections of notes and links.

Every function takes time in proportion to the page's length, even if the brackets of the page do not match.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from crosscut.corpus.readers.wikitext.formulas import write_formula
from crosscut.corpus.readers.wikitext.markup import GAP, escape
from crosscut.corpus.readers.wikitext.wiki import Wiki

_SILENT = (
    "ref", "references", "gallery", "timeline", "score", "syntaxhighlight", "source", "imagemap", "templatestyles",
    "includeonly", "templatedata", "mapframe", "maplink", "graph", "hiero", "inputbox", "categorytree", "indicator",
    "style", "script", "table",
)  # fmt: skip
"""Elements whose content is removed."""

_WRITTEN: dict[str, Callable[[str], str]] = {
    "nowiki": escape, "pre": escape, "math": write_formula, "chem": write_formula, "ce": write_formula
}  # fmt: skip
"""Elements whose content is not wiki markup, each with the function that converts the content to markup that shows the
same text."""

_ELEMENT = re.compile(rf"<(/?)({'|'.join((*_SILENT, *_WRITTEN))})(?=[\s/>])([^<>]*)>", re.IGNORECASE)
_TABLE = re.compile(r"^[ \t:*#]*\{\||^[ \t]*\|\}(?!\})", re.MULTILINE)
_HEADING = re.compile(r"^=[^\n]*=[ \t\x01]*$", re.MULTILINE)
_MARKUP = re.compile(r"<[^<>]*>|\{\{[^{}]*\}\}|\[\[(?:[^\[\]|]*\|)?|\]\]|''+|[\x01\"]")
_END_OF_LINE = re.compile(r"[ \t]*\n")


def remove_comments(markup: str) -> str:
    """Remove comments. A comment that fills a line is removed with its line end. An unclosed comment extends to the
    end.
    """
    pieces = []
    position = 0
    while (start := markup.find("<!--", position)) >= 0:
        end = markup.find("-->", start) + 3
        end = end if end > start else len(markup)
        begin = start
        while begin > position and markup[begin - 1] in " \t":
            begin -= 1
        if (not begin or markup[begin - 1] == "\n") and (rest := _END_OF_LINE.match(markup, end)):
            start, end = begin, rest.end()
        pieces.append(markup[position:start])
        position = end
    return "".join((*pieces, markup[position:])) if position else markup


def remove_elements(markup: str) -> str:
    """Remove elements that hold no prose, such as `<ref>`. The content of `<nowiki>` becomes literal text."""
    pieces = []
    position = 0
    for element in _elements(markup):
        if element.start >= position:
            write = _WRITTEN.get(element.name)
            kept = write(markup[element.inner_start : element.inner_end]) if write else GAP
            pieces += [markup[position : element.start], kept]
            position = element.end
    return "".join((*pieces, markup[position:])) if pieces else markup


class _Element(NamedTuple):
    """An element, as places in the markup. The element `<nowiki/>` has no content, so it becomes an empty text."""

    start: int
    end: int
    name: str = ""
    """Name in lower case. Empty for an element without an end, which is removed."""
    inner_start: int = 0
    inner_end: int = 0


def _elements(markup: str) -> list[_Element]:
    """Find elements, in the order of their starts."""
    found = []
    opened: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tag in _ELEMENT.finditer(markup):
        name = tag[2].lower()
        if tag[1] and not tag[3].strip() and opened[name]:
            start, inner_start = opened[name].pop()
            found.append(_Element(start, tag.end(), name, inner_start, tag.start()))
        elif tag[1] or tag[3].endswith("/"):
            found.append(_Element(*tag.span(), name))
        else:
            opened[name].append(tag.span())
    found += [_Element(*span) for spans in opened.values() for span in spans]
    return sorted(found)


def remove_tables(markup: str) -> str:
    """Remove tables. A table without an end reaches to the next heading."""
    if "{|" not in markup:
        return markup
    pieces = []
    position = depth = start = 0
    for mark in _TABLE.finditer(markup):
        if mark[0].endswith("{|"):
            start = start if depth else mark.start()
            depth += 1
        elif depth:
            depth -= 1
            if not depth:
                pieces.append(markup[position:start])
                position = mark.end()
    if depth:
        pieces.append(markup[position:start])
        heading = _HEADING.search(markup, start)
        position = heading.start() if heading else len(markup)
    return "\n".join((*pieces, markup[position:]))


def remove_sections(markup: str, wiki: Wiki) -> str:
    """Remove sections that hold no prose, such as References and External links, together with their subsections."""
    pieces = []
    position = within = 0
    for heading in _HEADING.finditer(markup):
        level, title = read_heading(heading[0])
        if within and level > within:
            continue
        is_end = wiki.is_end(_MARKUP.sub("", title), level)
        if within and not is_end:
            position = heading.start()
        elif is_end and not within:
            pieces.append(markup[position : heading.start()])
        within = level if is_end else 0
    return "".join(pieces if within else (*pieces, markup[position:]))


def read_heading(line: str) -> tuple[int, str]:
    """Read a line that begins and ends with `=`. Returns the level of the heading and its title."""
    inner = line.strip(" \t\x01")
    level = min(len(inner) - len(inner.lstrip("=")), len(inner) - len(inner.rstrip("=")), len(inner) // 2, 6)
    return level, inner[level : len(inner) - level].strip(" \t\x01")
