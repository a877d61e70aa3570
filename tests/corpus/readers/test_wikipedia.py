"""Articles of a dump, and what of them is prose."""

import bz2
from pathlib import Path
from xml.sax.saxutils import escape

from crosscut.corpus.readers import Reject, Text
from crosscut.corpus.readers.wikipedia import prose
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


def write(folder: Path, *pages: str, name: str = "a.xml") -> Path:
    data = (HEAD + "".join(pages) + "</mediawiki>").encode()
    (folder / name).write_bytes(bz2.compress(data) if name.endswith(".bz2") else data)
    return folder / name


def test_prose_of_an_article() -> None:
    assert prose(ARTICLE) == PROSE


def test_article_is_a_document_with_title_and_address(tmp_path: Path) -> None:
    for name in ("a.xml", "a.xml.bz2"):
        path = write(tmp_path, page("Paris & its églises (book)", ARTICLE), name=name)
        (item,) = read(path)
        assert item == Text(
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
    assert [(item.text, item.record) for item in items if isinstance(item, Text)] == [("Lyon is a city.", 4)]


def test_files_are_known_by_the_names_that_the_wiki_has_for_them(tmp_path: Path) -> None:
    path = write(tmp_path, page("Lyon", "Lyon is a city.[[Datei:Lyon.jpg|mini|not this]] [[Talk: a film|It]] is old."))
    assert texts(read(path)) == ["Lyon is a city. is old."]


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
        assert isinstance(reject, Reject)
        assert reject.rule == rule
        assert reject.lost > 0


def test_xml_that_is_no_dump_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    for content in (b"", b"no xml", b"<html><body/></html>", b"<mediawiki></mediawiki>"):
        path.write_bytes(content)
        (reject,) = read(path)
        assert isinstance(reject, Reject)
        assert (reject.place, reject.rule) == ("page 1", "not a MediaWiki dump")


def test_markup_that_is_never_closed_does_no_harm() -> None:
    assert prose("{{" * 3000 + "[[" * 3000 + "a") != ""
