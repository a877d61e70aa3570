"""Cut the boilerplate of sites from the texts of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.corpus.documents import count_bytes, read_table
from crosscut.corpus.sites.pages import Page, edge_lines, hash_line
from crosscut.corpus.sites.stages import key_of

CUTTING_VERSION = 1
"""Version of `cut_pages`. A change that gives other texts raises this number."""

OUTER_LINES = 3
"""Maximum number of lines between boilerplate and the beginning or the end of a page. The title of the page may be
there."""

MIN_BYTES = 40
"""Minimum length of successive lines of boilerplate, in bytes. A single short line, such as the heading "Examples", may
be a part of the article, although many pages share it."""

_EMPTY_LINES = re.compile(r"\s*\n|\s*\Z")


def cut_pages(pages: Sequence[Page], shared: Sequence[Path]) -> dict[int, str]:
    """Cut the boilerplate from pages. `shared` lists the files of the stage `site-boilerplate`.

    Returns the new text of each changed page, by the row of the page.
    """
    lines = [edge_lines(page.text) for page in pages]
    is_shared = iter(_find(pages, lines, shared).tolist())
    texts = {}
    for page, spans in zip(pages, lines, strict=True):
        text = _cut(page.text, [(*span, next(is_shared)) for span in spans])
        if text != page.text:
            texts[page.row] = text
    return texts


def _find(
    pages: Sequence[Page], lines: Sequence[Sequence[tuple[int, int]]], shared: Sequence[Path]
) -> npt.NDArray[np.bool_]:
    """Whether each line of each page is boilerplate in one of the page's folders."""
    keys, places = [], []
    place = 0
    for page, spans in zip(pages, lines, strict=True):
        folders = np.array(page.folders, np.uint64)
        for start, end in spans:
            keys.append(key_of(folders, np.array(hash_line(page.text[start:end]), np.uint64)))
            places += [place] * len(folders)
            place += 1
    found = np.zeros(place, dtype=bool)
    if not keys:
        return found
    wanted = np.concatenate(keys)
    for path in shared:
        known = read_table(path)["key"].to_numpy()
        if len(known):
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            found[np.array(places)[known[at] == wanted]] = True
    return found


def _cut(text: str, lines: Sequence[tuple[int, int, bool]]) -> str:
    """Cut groups of boilerplate, and the empty lines behind them. `lines` has the start and the end of each line near
    an end of the text, and whether the line is shared.

    A text that would lose everything stays, because the search for duplicates decides about it.
    """
    kept, done = [], 0
    for start, end in _groups(text, lines):
        if count_bytes(text[start:end]) >= MIN_BYTES:
            kept.append(text[done:start])
            behind = _EMPTY_LINES.match(text, end)
            done = behind.end() if behind else end
    left = "".join([*kept, text[done:]])
    return left.rstrip() if kept and left.strip() else text


def _groups(text: str, lines: Sequence[tuple[int, int, bool]]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each group of shared lines near the beginning or the end of a text. Only white
    space is between the lines of a group.
    """
    groups: list[list[int]] = []
    for place, (start, _, is_shared) in enumerate(lines):
        if is_shared and groups and groups[-1][1] == place - 1 and text[lines[place - 1][1] : start].isspace():
            groups[-1][1] = place
        elif is_shared:
            groups.append([place, place])
    for first, last in groups:
        if first <= OUTER_LINES or last >= len(lines) - 1 - OUTER_LINES:
            yield lines[first][0], lines[last][1]
