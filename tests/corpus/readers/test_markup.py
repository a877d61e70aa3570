"""Pages whose elements are nested too deeply are read in bounded time and memory, and other pages are not changed."""

import time
from pathlib import Path

import pytest

from crosscut.corpus.readers import markup as limits
from crosscut.corpus.readers.html import extract
from crosscut.corpus.readers.markup import MAX_DEPTH, limit_nesting
from crosscut.corpus.readers.steps import TooComplexError
from tests.corpus.reads import read, rejects

DEEP = 40_000


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<div>" * DEEP + "deep", "deep"),
        ("<DIV>" * DEEP + "deep" + "</DIV>" * DEEP, "deep"),
        ("<article>" * DEEP + "deep", "deep"),  # half a minute without the limit
        ("<form><div>" * DEEP + "deep", "deep"),
        ("<rp>" * DEEP + "deep", "deep"),  # half a minute
        ("<ol>deep" * DEEP, "deep " * (DEEP - 1) + "deep"),  # 8 GB of indentation
        ("".join(f"<p><font face=a{n}>deep" for n in range(DEEP)), "deep\n\n" * (DEEP - 1) + "deep"),  # gigabytes
        ("<p " + "".join(f"a{n}=1 " for n in range(DEEP)) + ">deep", "deep"),  # five seconds
        ("<p title='" + "x" * 10**6 + "'>deep", "deep"),
        ("<" * DEEP, "<" * DEEP),
        ("<select>" + "<option>x" * DEEP + "</select>deep", "deep"),
        ("<select><optgroup>" + "<option>x" * DEEP + "</select>deep", "deep"),
        ("<div>" * 999 + "<p>" * DEEP + "deep", "deep"),
        ("<article>" * 999 + "<br>" * DEEP + "deep", "deep"),
        ("<blockquote>" * 999 + "<p>" * DEEP + "deep", "deep"),
        ("".join(f"<a{n}>" for n in range(DEEP)) + "deep", "deep"),
    ],
    ids=lambda value: value[:12].strip(),
)
def test_deep_pages_take_a_moment(markup: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_AT_ONCE", 1 << 17)  # most of these pages are read piece by piece
    started = time.process_time()
    assert extract(markup, main_content=True) == ("", text)
    assert time.process_time() - started < 4


@pytest.mark.parametrize("tag", ["<p>", "</p>", "<hr>", "<li>a"])
def test_page_of_nothing_but_small_tags_is_too_complex(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TAGS", 5_000)
    number = 5_000 * limits.CHARACTERS_PER_TAG // (limits.CHARACTERS_PER_TAG - len(tag))
    with pytest.raises(TooComplexError, match="tags, but at most"):
        limit_nesting(tag * (number + 10))
    assert limit_nesting(tag * (number - 10)).is_searchable


@pytest.mark.parametrize(("name", "head"), [("a.html", ""), ("a.eml", "Content-Type: text/html\n\n")])
def test_page_that_is_too_complex_is_a_reject(
    tmp_path: Path, name: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TAGS", 5_000)
    (tmp_path / name).write_text(head + "<p>" * 10_000)
    ((_, rule),) = rejects(read(tmp_path / name))
    assert rule == "too complex"


@pytest.mark.parametrize(
    "markup",
    [
        "<p>a<b>b</b><i>c</i>",
        "<ul>" + "<li>item" * 9000 + "</ul>",
        "<table>" + "<tr><td><font size=2>cell" * 300 + "</table>",
        "<div>" * 900 + "<a href=b>link</a>" * 900 + "</div>" * 900,
        "<img src='data:image/png;base64," + "A" * 100_000 + "'>",
        "<span>text</span>" * 9000,
    ],
    ids=lambda value: value[:12],
)
def test_other_pages_are_not_changed(markup: str) -> None:
    assert limit_nesting(markup) == (markup, True)


def test_page_is_searched_up_to_the_maximum_depth() -> None:
    assert limit_nesting(("<div>" * MAX_DEPTH + "</div>" * MAX_DEPTH) * 2).is_searchable
    assert not limit_nesting("<div>" * 1001 + "</div>" * 1001 + "<p>" * 999).is_searchable


@pytest.mark.parametrize("tags", [["ol"], ["ul"], ["menu"], ["dir"], ["ul", "ol"]])
def test_text_of_nested_lists_is_not_longer_than_their_markup(tags: list[str]) -> None:
    markup = "".join(f"<{tag}>" for tag in tags) * (990 // len(tags)) + "<li>item" * 9000
    assert len(extract(markup, main_content=False)[1]) < 3 * len(markup)


def test_lists_of_many_levels_keep_their_indentation_on_a_short_page() -> None:
    markup = "<ul><li>item" * 200 + "</ul>" * 200
    assert limit_nesting(markup) == (markup, True)
