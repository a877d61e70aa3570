"""Articles of Wikipedia as text: MB/s of XML, and markup that is left, beside mwparserfromhell, gensim, wikiextractor.

    python benchmarks/corpus/wikipedia.py [--peers PYTHON] [--dump FOLDER]

The articles are real ones, which the tests of two packages hold (`wikipedia_dump.py`), with a page that has each
construct once. `--dump` names a folder with dumps to use instead. `dump` is Crosscut's reader as `prepare` uses it,
from the packed file to the text. All others get the markup of the articles:

    markup             Crosscut's function `prose`
    mwparserfromhell   `parse(markup).strip_code()`
    rest               mwparserfromhell on the markup that Crosscut leaves when it has removed what is not prose and has
                       rendered the templates; the seconds of both
    gensim             `filter_wiki`, which gensim uses for dumps
    wikiextractor      the command on the unpacked dump, without a database of templates

The peers need an environment of their own. `--peers` names its Python; without it, those that the Python of this
program can import take part:

    python -m venv .venv-peers && .venv-peers/bin/pip install gensim mwparserfromhell wikiextractor

All times are processor time of one process, and the contenders alternate. The counts of markup that is left are over
the texts of all articles. `--templates` also counts the templates in sentences, rendered or not.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line
from benchmarks.corpus.wikipedia_dump import EXPECTED, build_dump
from benchmarks.machine import print_machine
from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers import RawText, ReaderSettings, Reject, find_reader
from crosscut.corpus.readers.dumps import DumpPage, Pages
from crosscut.corpus.readers.files import File, find_source
from crosscut.corpus.readers.wikitext.markup import Templates
from crosscut.corpus.readers.wikitext.prose import prose
from crosscut.corpus.readers.wikitext.removal import remove_comments, remove_elements, remove_sections, remove_tables
from crosscut.corpus.readers.wikitext.templates import find_renderer
from crosscut.corpus.readers.wikitext.wiki import ARTICLES, Wiki

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "crosscut-benchmarks"
PEERS = ("mwparserfromhell", "rest", "gensim", "wikiextractor")

LEFT = {
    "[[": r"\[\[",
    "{{": r"\{\{",
    "|": r"\|",
    "<ref": r"<ref",
    "thumb|": r"thumb\|",
    "( )": r"\(\s*[,;]?\s*\)",
    ", ,": r", ,",
    "of ,": r"\bof ,",
    "x ,": r"\w [,;](?=\s)",
}
"""Patterns of markup that is left, and of gaps that removed markup leaves."""

SITEINFO = """<mediawiki xml:lang="en">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <base>https://en.wikipedia.org/wiki/Main_Page</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">File</namespace>
      <namespace key="10" case="first-letter">Template</namespace>
      <namespace key="14" case="first-letter">Category</namespace>
      <namespace key="828" case="first-letter">Module</namespace>
    </namespaces>
  </siteinfo>
"""

GOALS = {"MB/s": 5.0, "times mwparserfromhell": 2.5}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--peers", type=Path, default=Path(sys.executable), help="Python of the peers' environment")
    parser.add_argument("--dump", type=Path, help="folder with dumps to read instead of the packages' articles")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of downloaded packages")
    parser.add_argument("--turns", type=int, default=3, help="runs of each contender")
    parser.add_argument(
        "--templates", type=int, default=0, help="also print the N most frequent templates in sentences"
    )
    options = parser.parse_args(arguments)
    print_machine()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if not options.dump:
            build_dump(work / "dump", options.cache)
        files = find_source(
            SourceConfig(name="wikipedia", files=(str(options.dump or work / "dump"),), format="wikipedia")
        ).files
        pages = [(page, wiki) for file in files for page, wiki in articles(file)]
        megabytes = sum(len(chunk) for file in files for chunk, _ in file.chunks()) / 1e6
        print(f"{len(files)} dumps, {megabytes:.1f} MB of XML, {len(pages)} articles")
        rest_seconds = write_articles(pages, work)
        seconds, texts = compare(files, pages, work, options)
        seconds["rest"] = [one + rest_seconds for one in seconds.get("rest", [])]
    report(seconds, texts, megabytes)
    if options.templates:
        count_templates(pages, options.templates)


def articles(file: File) -> Iterator[tuple[DumpPage, Wiki]]:
    """Yield the articles of a dump as markup, with their wiki."""
    pages = Pages(10**9)
    for chunk, _ in file.chunks():
        for page in pages.feed(chunk):
            if page.namespace == ARTICLES and not page.is_redirect and not page.markup.lower().startswith("#redirect"):
                yield page, pages.wiki


def write_articles(pages: list[tuple[DumpPage, Wiki]], work: Path) -> float:
    """Write the articles for the peers. Returns the seconds in which Crosscut reduced the markup."""
    start = time.process_time()
    rests = [reduce(page, wiki) for page, wiki in pages]
    seconds = time.process_time() - start
    with (work / "articles.jsonl").open("w", encoding="utf-8") as lines:
        for (page, _), rest in zip(pages, rests, strict=True):
            lines.write(json.dumps({"title": page.title, "markup": page.markup, "rest": rest}) + "\n")
    with (work / "dump.xml").open("w", encoding="utf-8") as dump:
        dump.write(SITEINFO)
        for number, (page, _) in enumerate(pages, start=1):
            dump.write(
                f"  <page>\n    <title>{escape(page.title)}</title>\n    <ns>0</ns>\n    <id>{number}</id>\n"
                f"    <revision>\n      <id>{number}</id>\n"
                f'      <text xml:space="preserve">{escape(page.markup)}</text>\n    </revision>\n  </page>\n'
            )
        dump.write("</mediawiki>\n")
    return seconds


def reduce(page: DumpPage, wiki: Wiki) -> str:
    """Remove what is not prose, and render the templates, as `prose` does before it reads links."""
    markup = remove_sections(remove_tables(remove_elements(remove_comments(page.markup))), wiki)
    return Templates(markup, partial(find_renderer, language=wiki.language), wiki, page.title).render()


def compare(
    files: list[File], pages: list[tuple[DumpPage, Wiki]], work: Path, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run the contenders in turn. Returns their seconds and their texts by title."""
    seconds: dict[str, list[float]] = {"dump": [], "markup": []}
    texts: dict[str, Any] = {}
    missing: set[str] = set()
    for _ in range(options.turns):
        start = time.process_time()
        items = [item for file in files for item in find_reader("wikipedia")(file, ReaderSettings())]
        seconds["dump"].append(time.process_time() - start)
        texts["dump"] = {item.title: item.text for item in items if isinstance(item, RawText)}
        start = time.process_time()
        texts["markup"] = {page.title: prose(page.markup, wiki, page.title) for page, wiki in pages}
        seconds["markup"].append(time.process_time() - start)
        assert not any(isinstance(item, Reject) for item in items)
        for peer in (peer for peer in PEERS if peer not in missing):
            command = [str(options.peers), str(HERE / "wikipedia_peers.py"), peer, str(work)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                missing.add(peer)
                print(f"{peer} takes no part: {done.stderr.strip().splitlines()[-1]}")
                continue
            result = json.loads((work / f"{peer}.json").read_text(encoding="utf-8"))
            seconds.setdefault(peer, []).append(result["seconds"])
            texts[peer] = result["texts"]
    return seconds, texts


def report(seconds: Mapping[str, list[float]], texts: Mapping[str, Mapping[str, str]], megabytes: float) -> None:
    """Print a table of rates and of what is left, and whether the goals are met."""
    table = [["", "MB/s", "MB", *LEFT]]
    rates = {name: megabytes / statistics.median(values) for name, values in seconds.items() if values}
    for name, rate in rates.items():
        size = sum(len(text.encode()) for text in texts[name].values()) / 1e6
        left = [sum(len(re.findall(pattern, text)) for text in texts[name].values()) for pattern in LEFT.values()]
        table.append([name, f"{rate:.2f}", f"{size:.2f}", *(f"{number:,}" for number in left)])
    print(f"\n{aligned(table)}")
    reached = {"MB/s": rates["dump"]}
    if "mwparserfromhell" in rates:
        reached["times mwparserfromhell"] = rates["dump"] / rates["mwparserfromhell"]
    for name, value in reached.items():
        print(f"{name}: {value:.1f} (goal {GOALS[name]:g}){'' if value >= GOALS[name] else ' MISSED'}")
    if "Constructs" in texts["dump"]:
        print("constructs:", "as expected" if texts["dump"]["Constructs"] == EXPECTED else "NOT AS EXPECTED")


def count_templates(pages: list[tuple[DumpPage, Wiki]], most: int) -> None:
    """Print the templates that stand behind words of a line, by number of articles."""
    uses: Counter[str] = Counter()
    within: Counter[str] = Counter()
    rendered = {}
    for page, wiki in pages:
        markup = remove_sections(remove_tables(remove_elements(remove_comments(page.markup))), wiki)
        names = [
            " ".join(found[1].replace("_", " ").lower().split())
            for found in re.finditer(r"(?<=[^\s|={}])[^\S\n]*\{\{([^{}|<>\n]+)", markup)
        ]
        uses.update(names)
        within.update(set(names))
        rendered |= {name: find_renderer(name, wiki.language) is not None for name in names}
    print(f"\n{'template':<28}{'uses':>6}{'articles':>10}")
    for name, number in uses.most_common(most):
        print(f"{name:<28}{number:>6}{within[name]:>10}{'' if rendered[name] else '   removed'}")
    shown = sum(number for name, number in uses.items() if rendered[name])
    print(f"{shown:,} of {uses.total():,} uses are rendered")


if __name__ == "__main__":
    main()
