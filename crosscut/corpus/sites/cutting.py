"""Cut the boilerplate of sites from the texts of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, islice, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.corpus.documents import count_bytes, read_table
from crosscut.corpus.sites.pages import EDGE_LINES, SitePage, edge_lines, hash_line
from crosscut.corpus.sites.stages import key_of

CUTTING_VERSION = 1
"""Version of `cut_pages`. Increase it with every change that alters the resulting texts."""

OUTER_LINES = 3
"""Maximum number of lines between boilerplate and the beginning or the end of a page. These lines may hold the title of
the page."""

MIN_BYTES = 40
"""Minimum length of successive lines of boilerplate, in bytes. A single short line, such as the heading "Examples", may
be a part of the article even if many pages share it."""

Span = tuple[int, int]

_EMPTY_LINES = re.compile(r"\s*\n|\s*\Z")


def cut_pages(pages: Sequence[SitePage], shared: Sequence[Path]) -> dict[int, str]:
    """Cut the boilerplate from pages. `shared` lists the files of the stage `site-boilerplate`.

    Returns the new text of each changed page, by the row of the page.
    """
    lines = [edge_lines(page.text) for page in pages]
    is_shared = iter(_find(pages, lines, shared).tolist())
    texts = {}
    for page, spans in zip(pages, lines, strict=True):
        text = _cut(page.text, spans, list(islice(is_shared, len(spans))))
        if text != page.text:
            texts[page.row] = text
    return texts


def _find(pages: Sequence[SitePage], lines: Sequence[Sequence[Span]], shared: Sequence[Path]) -> npt.NDArray[np.bool_]:
    """Return one boolean per line of all pages: whether the line is boilerplate in one of the page's folders."""
    keys, places = [], []
    place = 0
    for page, spans in zip(pages, lines, strict=True):
        folders = np.array([folder.hash for folder in page.folders], np.uint64)
        for start, end in spans:
            keys.append(key_of(folders, np.array(hash_line(page.text[start:end]), np.uint64)))
            places += [place] * len(folders)
            place += 1
    found = np.zeros(place, dtype=bool)
    if not keys:
        return found
    wanted, of_line = np.concatenate(keys), np.array(places)
    for path in shared:
        known = read_table(path)["key"].to_numpy()
        if len(known):
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            found[of_line[known[at] == wanted]] = True
    return found


def _cut(text: str, lines: Sequence[Span], is_shared: Sequence[bool]) -> str:
    """Cut groups of boilerplate lines, and the empty lines after each group, out of a text. `lines` are the lines near
    both ends of the text.

    If less than half of the text would be left, nothing is cut. The page is then a copy or a version of other pages,
    and the search for duplicates must see all of its text.
    """
    kept, done = [], 0
    for first, last in _groups(text, lines, is_shared):
        if count_bytes(text[lines[first][0] : lines[last][1]]) >= MIN_BYTES:
            start = max(text.rfind("\n", 0, lines[first][0]) + 1, done)
            kept.append(text[done:start])
            behind = _EMPTY_LINES.match(text, lines[last][1])
            done = behind.end() if behind else lines[last][1]
    left = "".join([*kept, text[done:]]).rstrip()
    return left if kept and len(left) >= len(text) - len(left) else text


def _groups(text: str, lines: Sequence[Span], is_shared: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each group of successive shared lines that may be boilerplate.

    A group must be near the beginning or the end of the text, and next to an empty line or an end of the text. A group
    that reaches the innermost searched line is not boilerplate but a longer text that pages share.
    """
    gaps = [text[one[1] : other[0]] for one, other in pairwise(lines)]
    is_whole = len(lines) < 2 * EDGE_LINES
    for shared, group in groupby(range(len(lines)), key=lambda line: is_shared[line]):
        places = list(group)
        parts = [place + 1 for place in places[:-1] if not gaps[place].isspace()]  # the two ends of a long text
        for first, behind in pairwise([places[0], *parts, places[-1] + 1]):
            last = behind - 1
            is_outside = first <= OUTER_LINES or last >= len(lines) - 1 - OUTER_LINES
            is_inside = not is_whole and (last == EDGE_LINES - 1 or first == EDGE_LINES)
            if shared and is_outside and not is_inside and _is_alone(gaps, first, last):
                yield first, last


def _is_alone(gaps: Sequence[str], first: int, last: int) -> bool:
    """Whether a group of lines is directly next to an empty line or to an end of the text."""
    return first == 0 or last == len(gaps) or gaps[first - 1].count("\n") > 1 or gaps[last].count("\n") > 1
