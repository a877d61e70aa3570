"""Shared lines at the ends of pages go, and everything else stays."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from crosscut.corpus.documents import write_table
from crosscut.corpus.sites.cutting import cut_pages
from crosscut.corpus.sites.pages import Page, hash_line
from crosscut.corpus.sites.stages import SHARED, key_of

FOLDERS = (17, 4711)
KEYS = "Keyboard shortcuts\n\nPress the arrow keys to navigate between chapters"
FOOTER = "\u00a9 1998 The Example Project. All pages may be copied."
ARTICLE = "# Install\n\n    make install\n\nThe program is then in the path."


def cut(folder: Path, texts: Sequence[str], shared: Sequence[str], *, among: int = 1) -> list[str]:
    """Cut the lines of `shared` from texts. The lines are boilerplate in the second folder of each page."""
    keys = key_of(np.full(len(shared), FOLDERS[1], np.uint64), np.array([*map(hash_line, shared)], np.uint64))
    paths = [folder / f"{place}.arrow" for place in range(among)]
    for place, path in enumerate(paths):
        own = np.sort(keys)[place::among]
        write_table(path, {"key": own, "pages": np.ones(len(own), np.uint32)}, SHARED)
    pages = [Page(row, FOLDERS, text) for row, text in enumerate(texts)]
    found = cut_pages(pages, paths)
    return [found.get(row, text) for row, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{KEYS}\n\n{ARTICLE}", ARTICLE),
        (f"{ARTICLE}\n\n{FOOTER}", ARTICLE),
        (f"{KEYS}\n\n{ARTICLE}\n{FOOTER}\n", ARTICLE),
        (f"The Book\n\n{KEYS}\n\n    code\n{ARTICLE}", f"The Book\n\n    code\n{ARTICLE}"),
        (f"{ARTICLE}\n{FOOTER}\nPrinted on 7 May", f"{ARTICLE}\nPrinted on 7 May"),
        (f"{KEYS}\n{ARTICLE}\n{KEYS}", ARTICLE),
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
        "\n".join([*"abcdefgh", FOOTER, *"ijklmnop"]),  # far from both ends
        "\n".join([*map(str, range(30)), FOOTER, *map(str, range(30, 60))]),
        "",
    ],
)
def test_all_else_stays(tmp_path: Path, text: str) -> None:
    assert cut(tmp_path, [text], [*KEYS.split("\n\n"), FOOTER]) == [text]


def test_text_between_the_two_ends_of_a_long_page_stays(tmp_path: Path) -> None:
    """The last line of the beginning and the first line of the end are no neighbours."""
    lines = [f"shared line {number} of the site" for number in range(40)]
    text = "\n".join([*lines[:20], "own text", *lines[20:]])
    assert cut(tmp_path, [text], lines) == ["own text"]


def test_lines_are_found_in_all_files(tmp_path: Path) -> None:
    texts = [f"{KEYS}\n\n{ARTICLE}", f"{ARTICLE}\n{FOOTER}"]
    assert cut(tmp_path, texts, [*KEYS.split("\n\n"), FOOTER], among=3) == [ARTICLE, ARTICLE]


def test_nothing_is_cut_without_files(tmp_path: Path) -> None:
    assert cut(tmp_path, [f"{KEYS}\n\n{ARTICLE}"], [], among=0) == [f"{KEYS}\n\n{ARTICLE}"]
    assert cut_pages([], []) == {}
