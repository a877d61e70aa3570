"""Articles of a dump, and what of them is prose."""

import bz2
import time
import tracemalloc
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from crosscut.corpus.readers import RawText, Reject, Skip
from crosscut.corpus.readers.dumps import Pages
from crosscut.corpus.readers.wikitext.prose import prose
from tests.corpus.reads import read, rejects, skips, texts

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
<siteinfo><sitename>Wikipedia</sitename><dbname>enwiki</dbname><base>https://en.wikipedia.org/wiki/Main_Page</base>
<generator>MediaWiki 1.43</generator><case>first-letter</case><namespaces>
<namespace key="-2" case="first-letter">Media</namespace><namespace key="0" case="first-letter" />
<namespace key="1" case="first-letter">Talk</namespace><namespace key="6" case="first-letter">Datei</namespace>
</namespaces></siteinfo>
"""

ARTICLE = """{{Infobox city|name=Paris|population={{formatnum:2102650}}}}
[[File:Paris.jpg|thumb|A ''view'' of [[Paris]]]]
'''Paris''' ({{IPA|fr|paʁi}}) is the [[capital city|capital]] of [[France]].<ref name="a">Not ''this''.</ref> It is
&nbsp;old.<!-- nor this --> See [https://paris.fr its page].

== History ==
The ''Parisii'' lived there.{{citation needed}}
{| class="wikitable"
| not || this
|}
=== Middle ages ===
* It grew.
* It burned.

== See also ==
* [[Lyon]]
=== Deeper ===
nor this

== Name ==
Known as [[:Category:Lutetia|Lutetia]].

==References==
{{reflist}}
[[Category:Capitals]]
[[de:Paris]]
"""

PROSE = """\
Paris is the capital of France. It is
old. See its page.

History
The Parisii lived there.

Middle ages
It grew.
It burned.

Name
Known as Lutetia."""


def page(title: str, text: str, *, ns: int = 0, redirect: str = "", number: int = 1) -> str:
    to = f'<redirect title="{redirect}" />' if redirect else ""
    return (
        f"<page><title>{escape(title)}</title><ns>{ns}</ns><id>{number}</id>{to}<revision><id>1</id>"
        f"<timestamp>2024-01-01T00:00:00Z</timestamp><contributor><username>Jo</username><id>1</id></contributor>"
        f"<model>wikitext</model><format>text/x-wiki</format>"
        f'<text bytes="1" xml:space="preserve">{escape(text)}</text><sha1>x</sha1></revision></page>\n'
    )


def write(folder: Path, *pages: str, name: str = "a.xml", head: str = HEAD) -> Path:
    data = (head + "".join(pages) + "</mediawiki>").encode()
    (folder / name).write_bytes(bz2.compress(data) if name.endswith(".bz2") else data)
    return folder / name


def test_prose_of_an_article() -> None:
    assert prose(ARTICLE) == PROSE


def test_article_is_a_document_with_title_and_address(tmp_path: Path) -> None:
    for name in ("a.xml", "a.xml.bz2"):
        path = write(tmp_path, page("Paris & its églises (book)", ARTICLE), name=name)
        (item,) = read(path)
        assert item == RawText(
            PROSE,
            1,
            path.stat().st_size,
            url="https://en.wikipedia.org/wiki/Paris_%26_its_%C3%A9glises_(book)",
            title="Paris & its églises (book)",
        )


def test_redirects_other_namespaces_and_empty_pages_are_left_out_and_told(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        page("Paree", "#REDIRECT [[Paris]]", redirect="Paris"),
        page("Talk:Paris", "I think that ...", ns=1),
        page("Empty", "{{stub}}"),
        page("Lyon", "Lyon is a city."),
    )
    items = read(path)
    assert skips(items) == ["redirect", "no article", "blank"]
    assert [(item.text, item.record) for item in items if isinstance(item, RawText)] == [("Lyon is a city.", 4)]


def test_files_are_known_by_the_names_that_the_wiki_has_for_them(tmp_path: Path) -> None:
    path = write(tmp_path, page("Lyon", "Lyon is a city.[[Datei:Lyon.jpg|mini|not this]] [[Talk: a film|It]] is old."))
    assert texts(read(path)) == ["Lyon is a city. It is old."]


def test_language_of_the_dump_chooses_sections_and_templates(tmp_path: Path) -> None:
    text = "Lyon a {{formatnum:1234567}} habitants.\n== Liens externes ==\n* [http://lyon.example Lyon]"
    french = (
        HEAD.replace('xml:lang="en"', 'xml:lang="fr"'),
        HEAD.replace(' xml:lang="en"', "").replace("enwiki", "frwiki"),
    )
    for head in french:
        assert texts(read(write(tmp_path, page("Lyon", text), head=head))) == ["Lyon a 1 234 567 habitants."]


def test_dump_without_siteinfo_is_read_and_told(tmp_path: Path) -> None:
    head = '<mediawiki version="0.11" xml:lang="de">'
    path = write(
        tmp_path,
        page("Lyon", "Lyon[[Datei:A.jpg]]\n== Weblinks ==\nnot this"),
        page("Diskussion:Lyon", "a", ns=1),
        head=head,
    )
    lyon = RawText("Lyon", 1, path.stat().st_size, title="Lyon", note="no siteinfo")
    assert read(path) == [lyon, Skip("no article", 2)]


def test_page_with_broken_xml_is_rejected_and_its_neighbours_are_read(tmp_path: Path) -> None:
    good = [page(title, f"{title} is a city.") for title in ("A", "B", "C", "D")]
    for broken, reason in (
        (page("X", "x").replace("</title>", "</titel>"), "mismatched tag"),
        (page("X", "x").replace("<ns>0</ns>", "&nbsp;"), "undefined entity"),
        (page("X", "x\x00"), "not well-formed"),
        (page("X", "x").replace("</page>", ""), "the page has no end"),
    ):
        *items, last = read(write(tmp_path, good[0], broken, *good[1:], page("Z", "z")))
        assert [item.text for item in [*items, last] if isinstance(item, RawText)] == [
            "A is a city.", "B is a city.", "C is a city.", "D is a city.", "z",
        ]  # fmt: skip
        (reject,) = [item for item in items if isinstance(item, Reject)]
        assert (reject.place, reject.rule, reject.lost) == ("page 2", "broken XML", 0)
        assert reason in reject.reason
        assert last.record == 6


def test_page_is_read_whatever_else_its_element_holds(tmp_path: Path) -> None:
    old = "<page><title>Old_town</title><revision><text>An old page.</text></revision></page>"
    talk = "<page><title>Talk:Old</title><revision><text>Not this.</text></revision></page>"
    versions = page("New", "first").replace("</page>", "<revision><text>last</text></revision><upload/></page>")
    data = page("Data", "{}").replace("wikitext", "json")
    items = read(write(tmp_path, old, talk, versions, data, page("R", "#REDIRECT [[New]]")))
    assert texts(items) == ["An old page.", "last"]
    assert skips(items) == ["no article", "no article", "redirect"]


def test_pieces_that_were_joined_are_read_to_the_end(tmp_path: Path) -> None:
    for name in ("a.xml", "a.xml.bz2"):
        parts = [write(tmp_path, page(title, title), name=name).read_bytes() for title in ("A", "B")]
        (tmp_path / name).write_bytes(b"".join(parts))
        assert texts(read(tmp_path / name)) == ["A", "B"]


def test_chunks_of_any_size_give_the_same_pages() -> None:
    broken = page("X", "x").replace("</title>", "</titel>")
    unclosed = page("Y", "y").replace("</page>", "")
    pages = page("A", "[[é]] " * 50), broken, page("C", "c" * 90), unclosed, page("D", "d")
    data = (HEAD + "".join(pages) + "</mediawiki>").encode()

    def found(size: int) -> list[object]:
        pages = Pages(80)
        feeds = (pages.feed(data[start : start + size]) for start in range(0, len(data), size))
        read = [(page.number, page.title, page.length, bool(page.problem)) for feed in feeds for page in feed]
        return [*read, pages.close()]

    expected = [(1, "A", 300, False), (2, "", 0, True), (3, "C", 90, False), (4, "Y", 1, True), (5, "D", 1, False), ""]
    assert [found(size) for size in (1, 2, 7, 64, len(data))] == [expected] * 5


def test_memory_of_a_long_page_is_bounded() -> None:
    pages = Pages(1000)
    list(pages.feed(HEAD.encode() + b"<page><title>A</title><revision><text>"))
    tracemalloc.start()
    for _ in range(1000):
        list(pages.feed(b"long " * 2000))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    (page,) = pages.feed(b"</text></revision></page>")
    assert page.length == 10_000_000


def test_page_that_is_too_long_is_rejected_and_its_neighbours_are_read(tmp_path: Path) -> None:
    items = read(write(tmp_path, page("A", "a"), page("B", "b" * 2000), page("C", "c")), max_bytes=1000)
    assert (texts(items), rejects(items)) == (["a", "c"], [("page 2", "too long")])


def test_articles_before_the_end_of_a_truncated_dump_are_kept(tmp_path: Path) -> None:
    pages = [page(f"Page {n}", f"{n} " + "".join(chr(97 + n * k % 26) for k in range(3000))) for n in range(300)]
    for name, rule in (("a.xml", "not a MediaWiki dump"), ("a.xml.bz2", "damaged file")):
        path = write(tmp_path, *pages, name=name)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
        *kept, reject = read(path)
        assert len(kept) > 100
        assert all(text.startswith(f"{n} ") for n, text in enumerate(texts(kept)))
        assert reject.rule == rule
        assert reject.lost > 0


def test_xml_that_is_no_dump_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    entities = b'<!DOCTYPE mediawiki [<!ENTITY a "b">]><mediawiki><page><title>&a;</title></page></mediawiki>'
    for content in (b"", b"no xml", b"<html><body/></html>", b"<mediawiki></mediawiki>", entities):
        path.write_bytes(content)
        (reject,) = read(path)
        assert (reject.place, reject.rule) == ("page 1", "not a MediaWiki dump")


@pytest.mark.parametrize("start", ["<page a='", "<page><", "<!--", "<page>&"])
def test_tag_that_is_never_closed_is_read_once(start: str) -> None:
    pages = Pages(10**6)
    data = (f"<mediawiki>{start}" + "x" * (8 << 20)).encode() + page("B", "b").encode()
    began = time.process_time()
    found = [one for at in range(0, len(data), 1 << 14) for one in pages.feed(data[at : at + (1 << 14)])]
    assert [(one.title, bool(one.problem)) for one in found] == [("", True), ("B", False)]
    assert time.process_time() - began < 1


def test_elements_nested_without_end_break_their_page_only() -> None:
    pages = Pages(10**6)
    chunks = [("<mediawiki><page>" + "<a>" * 1000).encode(), page("B", "b").encode()]
    assert [one.problem for chunk in chunks for one in pages.feed(chunk)] == [
        "elements are nested more than 100 levels deep",
        "",
    ]


def test_markup_that_is_never_closed_does_no_harm() -> None:
    assert prose("{{" * 3000 + "[[" * 3000 + "a") != ""
