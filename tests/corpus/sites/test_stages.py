"""Lines are boilerplate where half of a folder's pages have them, whatever parts and shares the pages are in."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from crosscut.config.corpora import SourceFormat
from crosscut.corpus.documents import INGEST, Part, read_table
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.sites.pages import PageFinder, folders_of, hash_line
from crosscut.corpus.sites.stages import LINES, MIN_PAGES, find_boilerplate, key_of, write_lines
from tests.corpus.ingested import write_documents

FINDER = PageFinder((("s", SourceFormat.HTML),))


def find(folder: Path, pages: Sequence[tuple[str, str]], *, parts: int = 1, shares: int = 1) -> set[int]:
    """Keys of the boilerplate in pages of the given URLs and texts."""
    for stage in (INGEST, LINES):
        (folder / stage).mkdir(parents=True)
    all_of = [Part(folder, f"{number:06}-0000") for number in range(parts)]
    for number, part in enumerate(all_of):
        own = pages[number::parts]
        urls, texts = [url for url, _ in own], [text for _, text in own]
        ids = [f"s/f#{place}" for place in range(len(own))]
        write_documents(part.file(INGEST), ids, texts, urls=urls)
        write_lines(part, FINDER, Output(folder / LINES))
    found: set[int] = set()
    for share in range(shares):
        find_boilerplate(all_of, share, shares, Output(folder))
        table = read_table(folder / f"{share:05}.arrow")
        keys = table["key"].to_pylist()
        assert keys == sorted(keys)
        found |= set(keys)
    return found


def key(url: str, line: str, depth: int = -1) -> int:
    folder = folders_of("", url)[depth].hash
    return int(key_of(np.array([folder], np.uint64), np.array([hash_line(line)], np.uint64))[0])


def site(host: str, number: int, line: str, *, without: int = 0, folder: str = "") -> list[tuple[str, str]]:
    pages = [(f"https://{host}/{folder}{at}", f"{line}\nText {at} of {host}.") for at in range(number)]
    return pages + [(f"https://{host}/{folder}w{at}", f"Other text {at} of {host}.") for at in range(without)]


def test_lines_of_many_pages_are_boilerplate_in_their_folder_only(tmp_path: Path) -> None:
    found = find(
        tmp_path, site("a.org", MIN_PAGES, "Read the cookie policy.") + site("b.org", 3, "Read the cookie policy.")
    )
    assert found == {key("https://a.org/x", "Read the cookie policy.")}


@pytest.mark.parametrize(("number", "without", "is_found"), [(MIN_PAGES - 1, 0, 0), (12, 12, 1), (12, 13, 0)])
def test_a_line_needs_enough_pages_and_half_of_the_folder(
    tmp_path: Path, number: int, without: int, is_found: int
) -> None:
    assert len(find(tmp_path, site("a.org", number, "Home page", without=without))) == is_found


def test_one_folder_of_a_site_may_have_boilerplate_of_its_own(tmp_path: Path) -> None:
    pages = site("a.org", 20, "Press left or right", folder="book/") + site("a.org", 50, "", folder="blog/")
    assert find(tmp_path, pages) == {key("https://a.org/book/x", "Press left or right")}


def test_a_line_that_a_page_repeats_counts_once(tmp_path: Path) -> None:
    assert find(tmp_path, [("https://a.org/1", "Examples\n" * MIN_PAGES)]) == set()


def test_parts_and_shares_do_not_change_what_is_found(tmp_path: Path) -> None:
    pages = [
        page
        for host in range(9)
        for page in site(f"{host}.org", 11 + host, f"Menu {host}", without=host, folder="x/y/")
    ]
    expected = find(tmp_path / "one", pages)
    assert len(expected) == 9 * 3, "a line for each of the three folders of a page"
    assert find(tmp_path / "many", pages, parts=4, shares=3) == expected


def test_pages_without_lines_are_no_obstacle(tmp_path: Path) -> None:
    assert find(tmp_path, [("https://a.org/1", " "), ("", "")]) == set()


def test_copies_of_a_page_count_once(tmp_path: Path) -> None:
    text = "\n".join(f"Line {number} of an article" for number in range(200))
    assert find(tmp_path, [(f"https://a.org/?sid={number}", text) for number in range(50)]) == set()


def test_a_line_that_names_its_folder_is_counted_in_its_own_site(tmp_path: Path) -> None:
    pages = [
        (f"https://{host}.org/{number}", f"{host}.org\n" * (number < 2) + f"Text {number}")
        for host in "abcdefghij"
        for number in range(20)
    ]
    assert find(tmp_path, pages) == set()


def test_folders_of_the_same_depth_and_name_are_of_their_own_site(tmp_path: Path) -> None:
    pages = site("a.org", 20, "Menu of a", folder="x/") + site("b.org", 20, "", folder="x/")
    assert find(tmp_path, pages) == {key("https://a.org/x/y", "Menu of a"), key("https://a.org/x/y", "Menu of a", 0)}
