"""Documents are joined to lists of links by URL, in any spelling, and go by the votes of their links."""

import bz2
import json
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import DataError
from crosscut.config.corpora import UrlsConfig
from crosscut.corpus import explain_document, prepare_corpus
from crosscut.corpus.documents import Document, Drop
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.filters.links import LINK_LISTS, LinkFilter, LinkList, LinksOfSource, _describe, read_list
from crosscut.corpus.summary import _links
from tests.corpus.ingested import small_corpus, source
from tests.refusals import refusal


def read(path: Path, work: Path, min_karma: float = 3) -> Counts:
    (work / LINK_LISTS).mkdir(exist_ok=True)
    return read_list(LinkList(_describe(str(path)), path.stem), min_karma, Output(work / LINK_LISTS))


def judge(work: Path, lists: dict[str, bytes], *urls: str, required: bool = True, name: str = "web") -> list[Drop]:
    files = []
    for stem, content in lists.items():
        path = work / f"{stem}.tsv"
        path.write_bytes(content)
        read(path, work)
        files.append(LinkList(_describe(str(path)), stem).files(work))
    documents = [Document(row, f"{name}/f#{row}", "text", url) for row, url in enumerate(urls)]
    return list(LinkFilter(3, [LinksOfSource("web", required, tuple(files))])(documents).drops)


def test_documents_go_by_the_votes_of_their_link(tmp_path: Path) -> None:
    links = b"https://a.org/one\t3\nhttps://a.org/two\t2.5\tforum\n\nhttps://a.org/three\t-1\r\n"
    urls = ("https://a.org/one", "https://a.org/two", "https://a.org/three", "https://a.org/four", "")
    low = [Drop(1, "karma", "2.5"), Drop(2, "karma", "-1")]
    assert judge(tmp_path, {"a": links}, *urls) == [*low, Drop(3, "no link"), Drop(4, "no link")]
    assert judge(tmp_path, {"a": links}, *urls, required=False) == low
    assert judge(tmp_path, {"a": links}, *urls, name="wikipedia") == [], "the list belongs to another source"


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("http://www.A.org/one/", "https://a.org/one"),
        ("https://a.org/one?b=2&a=1", "a.org/one?a=1&utm_source=x&b=2"),
        ("https://a.org/%7Eone#top", "https://a.org/~one"),
    ],
)
def test_spellings_of_a_url_are_joined(listed: str, url: str, tmp_path: Path) -> None:
    assert judge(tmp_path, {"a": f"{listed}\t5\n".encode()}, url, "https://a.org/on") == [Drop(1, "no link")]


def test_the_most_votes_of_all_lines_and_lists_count(tmp_path: Path) -> None:
    lists = {
        "a": b"https://a.org/x\t1\nhttp://a.org/x/\t9\nhttps://a.org/x\t2\nhttps://a.org/y\t1\n",
        "b": b"https://a.org/y\t4\nhttps://a.org/z\t1\n",
    }
    assert judge(tmp_path, lists, "a.org/x", "a.org/y", "a.org/z") == [Drop(2, "karma", "1")]


def test_counts_tell_lines_urls_and_links_with_enough_votes(tmp_path: Path) -> None:
    path = tmp_path / "links.tsv.bz2"
    path.write_bytes(bz2.compress(b"a.org/x\t1\nhttp://a.org/x\t3\na.org/y\t2\n\n"))
    assert read(path, tmp_path) == {"lists": {str(path): {"lines": 3, "urls": 2, "enough": 1}}}


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_list_without_links_is_refused(tmp_path: Path, content: bytes) -> None:
    """Every document would be dropped."""
    path = tmp_path / "links.tsv"
    path.write_bytes(content)
    assert refusal(DataError, read, path, tmp_path) == (
        f"`{path}` must list links, one on each line, but has none. Check the file, or remove it from `sources.links`."
    )


DAMAGE = [b"a.org", b"a.org 3", b"a.org\tmany", b"a.org\tnan", b"\t3", b"3\ta.org", b"a b\t3", b"\xff.org\t3"]


@pytest.mark.parametrize("line", [*DAMAGE, b"a.org/" + b"x" * 70_000 + b"\t3"])
def test_a_damaged_line_is_named_by_its_file_and_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "links.tsv"
    path.write_bytes(b"a.org\t3\n" + line + b"\n")
    told = refusal(DataError, read, path, tmp_path)
    rule = "must have a URL, a tab and a number of votes on each line"
    assert told.startswith(f"`{path}` {rule}, but has not on line 2 (")


def test_many_damaged_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "links.tsv"
    path.write_bytes(b"\n".join([b"a.org\t3", *DAMAGE]))
    told = refusal(DataError, read, path, tmp_path)
    assert "line 2 (`a.org`), line 3 (`a.org 3`), line 4 (`a.org\tmany`) and 5 more. Correct or remove" in told


def test_missing_list_is_told(tmp_path: Path) -> None:
    assert "no.tsv` must be a readable file" in refusal(DataError, _describe, str(tmp_path / "no.tsv"))


@pytest.mark.slow  # prepares a corpus twice; the tests above find the same faults of the filter
def test_a_corpus_reports_its_links(tmp_path: Path) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    page = "The committee of the {} met on a Tuesday to speak about roads, bridges, schools, harbours and the weather."
    web = [{"text": page.format(name) * 9, "url": f"https://a.org/{name}"} for name in ("cats", "dogs", "cows", "pigs")]
    wiki = [{"text": page.format("encyclopedia") * 9, "url": "https://a.org/dogs?"}]
    links = tmp_path / "links.tsv"
    links.write_text("http://www.a.org/cats/\t7\na.org/dogs\t1\na.org/pigs\t3\na.org/hens\t3\n")
    sources = [source("web", write("web", web), links=(str(links),)), source("wiki", write("wiki", wiki))]
    config = small_corpus(tmp_path / "out", *sources, urls=UrlsConfig(duplicates=False))
    report = prepare_corpus(config, progress=False).report
    (entry,) = (stage for stage in report["flow"] if stage["stage"] == "links")
    assert {rule: one["documents"] for rule, one in entry["rules"].items()} == {"karma": 1, "no link": 1}
    assert _links(report) == [
        f"links       {links}: 4 URLs on 4 lines, 3 with at least 3 votes",
        "links       web: 3 of 4 documents have a link",
    ]
    assert "dropped: karma, 1" in explain_document(config, "web/web.jsonl#2")
    assert "karma 7" in explain_document(config, "web/web.jsonl#1")
    assert "karma" not in explain_document(config, "wiki/wiki.jsonl#1")
    links.write_text("a.org/cats\t7\na.org/dogs\t3\n")
    again = prepare_corpus(config, progress=False)
    assert again.report["links"]["joined"] == {"web": {"documents": 4, "with_link": 2}}
    assert "urls" not in [stage.name for stage in again.stages if stage.num_run]
