"""Real markup of Wikipedia, from packages whose tests hold articles, as a dump in pieces.

pip and npm download the packages into a cache. Their content is checked by SHA-256, and nothing of it is in the
repository:

    gensim 4.4.0           106 articles and 99 redirects of the English Wikipedia of 2016 (a shortened dump), 5 articles
                           with tables (a dump without <siteinfo>), and pages of the Bulgarian one (a dump in UTF-16)
    wtf_wikipedia 0.6.1    8 articles of the English Wikipedia of 2015, as markup
"""

import bz2
import hashlib
import html
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks.corpus.extraction.archives import download, read_members


class Package(NamedTuple):
    """A package that a registry holds."""

    registry: str
    package: str
    version: str
    archive: str
    sha256: str


GENSIM = Package(
    "pypi", "gensim", "4.4.0", "gensim-4.4.0.tar.gz", "a3f5b626da5518e79a479140361c663089fe7998df8ba52d56e1ded71ac5bdf5"
)
WTF = Package(
    "npm", "wtf_wikipedia", "0.6.1", "wtf_wikipedia-0.6.1.tgz",
    "0c11832a97bd9f3297780bba1897355b321b3860b90cbbfe6f54e0c3c0c55a2d",
)  # fmt: skip

DATA = "gensim-4.4.0/gensim/test/test_data/"
DUMP = f"{DATA}enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
TABLES = f"{DATA}enwiki-table-markup.xml.bz2"
BULGARIAN = f"{DATA}bgwiki-latest-pages-articles-shortened.xml.bz2"

CONSTRUCTS = """'''Aland'''<ref name="a">{{cite book|[[B]]}}</ref> ({{IPAc-en|a|l}}; {{lang-fr|''Alande''}}, \
pronounced {{IPA-fr|aland}}) is an island of {{convert|2381741|km2|sqmi}}<!-- {{not}} --> with 10<sup>3</sup> people
{{as of|2014|lc=y}}.{{citation needed}}
{| class="wikitable"
| [[File:A.jpg|thumb|300px|A ''caption'' with [[link]]s]] || {{flagicon|X}} {| nested
|}
|}
[[File:A.jpg|thumb|300px|A ''caption'' with [[link]]s and [http://a.example b]]]__TOC__ It has {{chem|H|2|O}},<br>salt
and {{val|1.5|e=6|u=t}} of {{nowrap|rock {{small|(old)}}}}, where <math>x_i \\le 2</math>. [[:Category:Islands]]
{{Infobox|a={{b|c}}|d=[[e|f]]}}

== Name ==
{{quote|''Aland'' is old.|Roe}}
=== Pictures ===
<gallery>
File:B.jpg|b
</gallery>
== Footnotes and references ==
{{reflist|refs=<ref name="a">b</ref>}}
== External links ==
* [http://a.example a]
[[Category:Islands]]
[[de:Aland]]
"""

EXPECTED = """Aland (French: Alande) is an island of 2,381,741 square kilometres (919,595 sq mi) with 10³ people
as of 2014.

It has H2O, salt
and 1.5×10⁶ t of rock (old), where x_i ≤ 2.

Name
Aland is old."""  # noqa: RUF001 - the signs of the text


def build_dump(folder: Path, cache: Path) -> None:
    """Write the articles into `folder` as pieces under the names that Wikipedia gives them."""
    cache.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    gensim, wtf = (_fetch(package, cache) for package in (GENSIM, WTF))
    dumps = read_members(gensim, {DUMP, TABLES, BULGARIAN})
    first = bz2.decompress(dumps[DUMP])
    pages = "".join(_page(title, markup, number) for number, (title, markup) in enumerate(_articles(wtf)))
    joined = first.removesuffix(b"\n").removesuffix(b"</mediawiki>") + pages.encode() + b"</mediawiki>\n"
    pieces = {
        "enwiki-20240101-pages-articles1.xml-p1p41242.bz2": bz2.compress(joined),
        "enwiki-20240101-pages-articles2.xml-p41243p151573.bz2": dumps[TABLES],
        "bgwiki-20240101-pages-articles.xml.bz2": dumps[BULGARIAN],
    }
    for name, content in pieces.items():
        (folder / name).write_bytes(content)


def _fetch(package: Package, cache: Path) -> Path:
    """Download a package if the cache does not hold it."""
    path = cache / package.archive
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            shutil.move(download(package, Path(folder)), path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise SystemExit(f"`{path}` must have the SHA-256 {package.sha256}, but has {found}. Remove the file.")
    return path


def _articles(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield titles and markup of wtf_wikipedia's articles, and the page with all constructs."""
    yield "Constructs", CONSTRUCTS
    with tarfile.open(archive) as tar:
        names = {name for name in tar.getnames() if name.startswith("package/tests/cache/")}
    for name, content in sorted(read_members(archive, names).items()):
        markup = content.decode()
        yield Path(name).stem, html.unescape(markup) if "&lt;ref" in markup else markup  # one was saved as XML


def _page(title: str, markup: str, number: int) -> str:
    return (
        f"<page><title>{escape(title)}</title><ns>0</ns><id>{9_000_000 + number}</id><revision><id>1</id>"
        "<timestamp>2016-01-01T00:00:00Z</timestamp><contributor><ip>127.0.0.1</ip></contributor>"
        f'<model>wikitext</model><format>text/x-wiki</format><text xml:space="preserve">{escape(markup)}</text>'
        "</revision></page>\n"
    )
