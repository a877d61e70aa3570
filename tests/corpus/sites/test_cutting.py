"""Shared lines at the ends of pages go, and everything else stays."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from crosscut.corpus.documents import write_table
from crosscut.corpus.sites.cutting import cut_pages
from crosscut.corpus.sites.pages import EDGE_LINES, SiteFolder, SitePage, hash_line
from crosscut.corpus.sites.stages import SHARED, key_of

FOLDERS = (17, 4711)
KEYS = "Keyboard shortcuts\n\nPress the arrow keys to navigate between chapters"
FOOTER = "\u00a9 1998 The Example Project. All pages may be copied."
ARTICLE = (
    "# Install\n\n    make install\n\nThe program is then in the path.\nIt needs neither an account nor a network.\n\n"
    "Done: enjoy."
)


def cut(folder: Path, texts: Sequence[str], shared: Sequence[str], *, among: int = 1) -> list[str]:
    """Cut the lines of `shared` from texts. The lines are boilerplate in the second folder of each page."""
    keys = key_of(np.full(len(shared), FOLDERS[1], np.uint64), np.array([*map(hash_line, shared)], np.uint64))
    paths = [folder / f"{place}.arrow" for place in range(among)]
    for place, path in enumerate(paths):
        own = np.sort(keys)[place::among]
        write_table(path, {"key": own}, SHARED)
    folders = tuple(SiteFolder(depth, number) for depth, number in enumerate(FOLDERS))
    pages = [SitePage(row, folders, text) for row, text in enumerate(texts)]
    found = cut_pages(pages, paths)
    return [found.get(row, text) for row, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{KEYS}\n\n{ARTICLE}", ARTICLE),
        (f"{ARTICLE}\n\n{FOOTER}", ARTICLE),
        (f"{ARTICLE}\n{FOOTER}\n", ARTICLE),
        (f"The Book\n\n{KEYS}\n\n    code\n{ARTICLE}", f"The Book\n\n    code\n{ARTICLE}"),
        (f"{ARTICLE}\n\n{FOOTER}\nPrinted on 7 May", f"{ARTICLE}\n\nPrinted on 7 May"),
        (f"Title\n    {FOOTER}\n\n{ARTICLE}", f"Title\n{ARTICLE}"),
        (f"   {FOOTER}\n\n    code\n{ARTICLE}", f"    code\n{ARTICLE}"),
    ],
)
def test_boilerplate_at_the_ends_goes(tmp_path: Path, text: str, left: str) -> None:
    assert cut(tmp_path, [text], [*KEYS.split("\n\n"), FOOTER]) == [left]


@pytest.mark.parametrize(
    "text",
    [
        ARTICLE,
        f"Keyboard shortcuts\n\n{ARTICLE}",  # short
        f"{KEYS}\n\n{FOOTER}",  # nothing would be left
        f"{KEYS}\n\nMuch less than half.",
        f"def f():\n{FOOTER}\nprint(1)\n\n{ARTICLE}",  # in the middle of a paragraph
        "\n".join([*"abcdefgh", FOOTER, *"ijklmnop"]),  # far from both ends
        "\n".join([*map(str, range(30)), FOOTER, *map(str, range(30, 60))]),
        "",
    ],
)
def test_all_else_stays(tmp_path: Path, text: str) -> None:
    assert cut(tmp_path, [text], [*KEYS.split("\n\n"), FOOTER]) == [text]


def test_text_between_the_two_ends_of_a_long_page_stays(tmp_path: Path) -> None:
    """The last line of the beginning and the first line of the end are no neighbours."""
    own = [f"own line {number} of the page" for number in range(200)]
    shared = [f"shared line {number} of the site" for number in range(2 * EDGE_LINES - 2)]
    first, last = shared[: EDGE_LINES - 1], shared[EDGE_LINES - 1 :]
    text = "\n".join([*first, "", *own, "", *last])
    assert cut(tmp_path, [text], shared) == ["\n".join(own)]


def test_text_that_fills_the_searched_lines_is_no_boilerplate(tmp_path: Path) -> None:
    """Versions of one manual share more than the lines that are searched."""
    lines = [f"shared line {number} of the manual" for number in range(200)]
    assert cut(tmp_path, ["\n".join(lines)], lines) == ["\n".join(lines)]
    text = "\n".join(["Version 7", *lines])
    assert cut(tmp_path, [text], lines) == [text]


def test_lines_are_found_in_all_files(tmp_path: Path) -> None:
    texts = [f"{KEYS}\n\n{ARTICLE}", f"{ARTICLE}\n{FOOTER}"]
    assert cut(tmp_path, texts, [*KEYS.split("\n\n"), FOOTER], among=3) == [ARTICLE, ARTICLE]


def test_nothing_is_cut_without_files(tmp_path: Path) -> None:
    assert cut(tmp_path, [f"{KEYS}\n\n{ARTICLE}"], [], among=0) == [f"{KEYS}\n\n{ARTICLE}"]
    assert cut_pages([], []) == {}
