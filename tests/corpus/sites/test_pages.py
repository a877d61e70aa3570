"""Pages are known by their source, and have the folders of their URL or file."""

import time
from collections.abc import Callable

import pytest

from crosscut.config.corpora import SourceConfig
from crosscut.corpus.documents import INGEST, Part
from crosscut.corpus.sites.pages import (
    EDGE_CHARACTERS,
    EDGE_LINES,
    MAX_DEPTH,
    MAX_FOLDERS,
    MAX_LINE,
    PageFinder,
    edge_lines,
    folders_of,
    hash_line,
)
from tests.corpus.ingested import write_documents


def source(name: str, kind: str) -> SourceConfig:
    return SourceConfig(name=name, files=("f",), format=kind)


def test_pages_are_documents_of_web_formats_and_of_files_with_such_a_suffix(make_part: Callable[..., Part]) -> None:
    part = make_part(["x"] * 7)
    names = ["h/a#1", "w/b.warc.gz#1", "a/c.HTML#1", "a/d.htm.gz~2#1", "a/e.jsonl#1", "t/f.html#1", "a/html#1"]
    write_documents(part.work / INGEST / f"{part.name}.arrow", names, names)
    finder = PageFinder.of([source("h", "html"), source("w", "warc"), source("a", "auto"), source("t", "text")])
    assert finder is not None
    assert [(page.row, page.text) for page in finder.find(part)] == list(enumerate(names[:4]))


@pytest.mark.parametrize(("kind", "has_pages"), [("jsonl", False), ("mail", False), ("wet", True), ("auto", True)])
def test_a_corpus_without_web_sources_has_no_finder(kind: str, has_pages: bool) -> None:
    assert (PageFinder.of([source("s", kind)]) is not None) == has_pages


def test_folders_are_the_beginnings_of_the_url() -> None:
    page = folders_of("s/f.warc#7", "https://www.Example.com/book/install.html?print=1#top")
    assert page == folders_of("s/f.warc#8", "http://example.com/book/other.html")
    assert page[:1] == folders_of("s/f.warc#9", "https://example.com/")
    assert len(page) == 2
    assert page[0] == folders_of("s/f.warc#9", "https://example.com/blog/2020/a.html")[0]
    assert page[1] != folders_of("s/f.warc#9", "https://example.com/blog/a.html")[1]


def test_folders_are_the_beginnings_of_the_file_name_if_there_is_no_url() -> None:
    assert folders_of("docs/book/a.html#1", "") == folders_of("docs/book/b.html~2#1", "")
    assert len(folders_of("docs/a.html#1", "")) == 1


def test_a_deep_page_has_its_site_and_its_innermost_folders() -> None:
    deep = folders_of("docs/" + "x/" * 20 + "a.html#1", "")
    assert [folder.depth for folder in deep] == [0, *range(22 - MAX_FOLDERS, 21)]
    assert deep[0] == folders_of("docs/b.html#1", "")[0]
    assert deep[-1] == folders_of("docs/" + "x/" * 20 + "b.html#1", "")[-1]
    assert max(folder.depth for folder in folders_of("docs/" + "x/" * 99 + "a.html#1", "")) == MAX_DEPTH - 1


@pytest.mark.parametrize("url", ["https://a.org/book/", "https://a.org/book/?a=1/2", "https://a.org/book/#!/x/y"])
def test_a_folders_own_page_is_in_the_folder(url: str) -> None:
    assert folders_of("", url) == folders_of("", "https://a.org/book/chapter.html")


@pytest.mark.parametrize("url", ["http://", "//", "x", "http://[bad/x", "https://a.org", "https://a.org/#!/x/y"])
def test_every_url_has_a_site(url: str) -> None:
    assert folders_of("s/f#1", url)[0].depth == 0


def test_edge_lines_are_the_lines_at_both_ends_without_white_space() -> None:
    text = " first \n\n\t\nsecond\tword  \n"
    assert [text[start:end] for start, end in edge_lines(text)] == ["first", "second\tword"]
    text = "\n".join(map(str, range(100)))
    found = [int(text[start:end]) for start, end in edge_lines(text)]
    assert found == [*range(EDGE_LINES), *range(100 - EDGE_LINES, 100)]
    assert edge_lines(" \n") == []


@pytest.mark.parametrize("middle", ["a\n" * 2_000_000, "word " * 1_000_000, "\n" * 4_000_000, " " * 4_000_000])
def test_only_the_ends_of_a_long_text_are_read(middle: str) -> None:
    text = "first\nsecond\n" + middle + "\nlast"
    started = time.process_time()
    found = [text[start:end] for start, end in edge_lines(text)]
    assert found[:2] == ["first", "second"]
    assert found[-1] == "last"
    assert len(found) <= 2 * EDGE_LINES
    assert time.process_time() - started < 1


def test_a_part_of_a_line_is_no_line() -> None:
    text = "first\n" + "x" * (EDGE_CHARACTERS - 8) + " y" * EDGE_CHARACTERS
    assert [text[start:end] for start, end in edge_lines(text)] == ["first"]


def test_white_space_does_not_change_the_hash_of_a_line() -> None:
    assert hash_line("Next\u00a0 page") == hash_line("Next page") != hash_line("Nextpage")
    assert hash_line("7 } 4") == hash_line("-----") == 0 != hash_line("a.b.c")
    assert hash_line("x" * MAX_LINE) != 0 == hash_line("x" * (MAX_LINE + 1))
