"""A page is a document: main text and title."""

from pathlib import Path

from crosscut.corpus.readers import RawText, Skip
from crosscut.corpus.readers.html import MAX_PAGE_BYTES
from tests.corpus.reads import read

PAGE = """<!DOCTYPE html><html><head><meta charset="{charset}"><title> A Tale
of Two&nbsp;Cities </title><style>p {{ color: red }}</style><script>var best = 'of times';</script></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/about">About us</a></li></ul></nav>
<main><h1>The Period</h1>
<p>It was the best of times, it was the <b>worst</b> of times,
it was the age of wisdom &amp; the age of foolishness.</p>
<p>Il était une fois un roi.</p></main>
<footer><p>Copyright 1859, all rights reserved</p></footer></body></html>"""

TEXT = """The Period

It was the best of times, it was the worst of times, it was the age of wisdom & the age of foolishness.

Il était une fois un roi."""


def write(folder: Path, data: bytes) -> Path:
    (folder / "a.html").write_bytes(data)
    return folder / "a.html"


def test_main_text_and_title_are_found_and_frames_left_out(tmp_path: Path) -> None:
    data = PAGE.format(charset="utf-8").encode()
    assert read(write(tmp_path, data)) == [RawText(TEXT, 1, len(data), title="A Tale of Two Cities")]


def test_declared_charset_is_taken(tmp_path: Path) -> None:
    (item,) = read(write(tmp_path, PAGE.format(charset="iso-8859-1").encode("iso-8859-1")))
    assert (item.text, item.note) == (TEXT, "")


def test_charset_that_lies_is_told(tmp_path: Path) -> None:
    (item,) = read(write(tmp_path, PAGE.format(charset="iso-8859-1").encode()))
    assert (item.text, item.note) == (TEXT, "charset")


def test_page_without_text_is_passed_over(tmp_path: Path) -> None:
    assert read(write(tmp_path, b"")) == [Skip("blank", 1)]
    assert read(write(tmp_path, b"<html><body><script>only()</script></body></html>")) == [Skip("blank", 1)]


def test_page_of_nothing_but_its_frame_is_not_called_blank(tmp_path: Path) -> None:
    assert read(write(tmp_path, b"<nav><a href='1'>Home</a></nav>")) == [Skip("no main text", 1)]


def test_page_of_no_charset_is_rejected(tmp_path: Path) -> None:
    (reject,) = read(write(tmp_path, b"<p>" + bytes(range(0x80, 0xA0)) * 50 + b"\xff\xfe\xfd" * 500))
    assert (reject.place, reject.rule) == ("byte 0", "charset")


def test_surrogates_and_nuls_in_references_do_no_harm(tmp_path: Path) -> None:
    (item,) = read(write(tmp_path, b"<p>a &#xD800; b &#0; c \0 d</p>"))
    assert item.text.encode().startswith(b"a ")


def test_deep_nesting_takes_no_time(tmp_path: Path) -> None:
    """To look for the main text of this page takes minutes."""
    (item,) = read(write(tmp_path, b"<div>" * 50_000 + b"deep" + b"</div>" * 50_000))
    assert item.text == "deep"


def test_page_that_only_has_frames_is_counted_by_name(tmp_path: Path) -> None:
    frames = (
        b"<html><frameset cols='1,2'><frame src=a><noframes>Use a browser with frames.</noframes></frameset></html>"
    )
    assert read(write(tmp_path, frames)) == [Skip("frameset", 1)]


def test_page_above_the_limit_of_pages_is_rejected(tmp_path: Path) -> None:
    (reject,) = read(write(tmp_path, b"<p>" + b"x" * MAX_PAGE_BYTES))
    assert (reject.rule, reject.reason) == ("too long", "the page is longer than 16 MB (the limit of web pages)")


def test_charset_of_a_page_that_cannot_be_true_is_not_believed(tmp_path: Path) -> None:
    (item,) = read(write(tmp_path, PAGE.format(charset="utf-16").encode()))
    assert (item.text, item.note) == (TEXT, "")
