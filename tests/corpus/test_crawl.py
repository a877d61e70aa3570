"""A corpus from a crawl and from a folder of pages, from the files to the tokens."""

import io
import json
from pathlib import Path

import pytest
from fastwarc.warc import ArchiveIterator, WarcRecordType
from rich.console import Console

from crosscut.config.corpora import IngestConfig
from crosscut.corpus import CorpusResult, explain_document, prepare_corpus, print_summary
from crosscut.data import read_documents
from tests.corpus.ingested import small_corpus, source
from tests.corpus.readers.archives.crawls import SITE, crawl, pack, page, response, write
from tests.corpus.readers.archives.test_wet import conversion


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of a crawl, one of them damaged at its end, its texts, and a folder of pages with pictures."""
    folder = tmp_path_factory.mktemp("crawl")
    texts = [document.text[:3000] for document in read_documents(["builtin:state-of-the-union"], text_key="text")][:60]
    pages = [(f"speech-{number}.html", page(text, f"Speech {number}")) for number, text in enumerate(texts)]
    (folder / "crawl").mkdir()
    (folder / "site").mkdir()
    records = [*crawl(pages[:20]), response("photo.jpg", page("a photo")), response("moved", b"", status="301 Moved")]
    write(folder / "crawl" / "CC-MAIN-00000.warc.gz", pack(records))
    write(folder / "crawl" / "CC-MAIN-00001.warc.gz", pack(crawl(pages[20:40]))[:-100])
    write(
        folder / "crawl" / "CC-MAIN-00002.warc.wet.gz", pack([conversion("t", text.encode()) for text in texts[40:50]])
    )
    for number, text in enumerate(texts[50:]):
        write(folder / "site" / f"{number}.html", page(text))
    for number in range(3):
        write(folder / "site" / f"{number}.png", b"\x89PNG\r\n\x1a\n\0")
    return folder


@pytest.fixture(scope="module")
def result(files: Path) -> CorpusResult:
    sources = (source("crawl", files / "crawl"), source("site", files / "site", format="html"))
    ingest = IngestConfig(max_rejects=0.2, max_damaged_files=1)
    return prepare_corpus(small_corpus(files / "corpus", *sources, ingest=ingest), progress=False)


def test_crawl_becomes_a_corpus_and_everything_else_is_told(result: CorpusResult) -> None:
    report = result.report
    assert report["summary"]["read"]["documents"] == 60
    ingest = report["flow"][0]
    assert {rule: amount["documents"] for rule, amount in ingest["rules"].items()} == {
        "request record": 40,
        "metadata record": 39,
        "warcinfo record": 2,
        "damaged file": 1,
        "file type": 1,
        "status not 200": 1,
    }
    (damaged,) = report["damaged"]
    assert (damaged["name"], damaged["documents"]) == ("crawl/CC-MAIN-00001.warc.gz", 20)
    assert report["left_out"] == {"site": {".png": 3}}


def test_summary_tells_in_one_line_what_was_left_out(result: CorpusResult) -> None:
    console = Console(file=io.StringIO(), width=200)
    print_summary(result.config, result.report, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "left out    site: 3 files are not of the format html: 3 .png" in lines


def test_history_of_a_page_begins_with_its_file_offset_and_url(result: CorpusResult) -> None:
    work = Path(result.config.folder) / "work" / "ingest"
    (line,) = [line for path in work.glob("*.rejects.jsonl") for line in path.read_text().splitlines()]
    reject = json.loads(line)
    assert reject["name"] == "crawl/CC-MAIN-00001.warc.gz"
    offset = reject["place"].removeprefix("byte ")
    assert "not read" in explain_document(result.config, f"crawl/CC-MAIN-00001.warc.gz#{offset}")
    archive = ArchiveIterator(f"{result.config.sources[0].files[0]}/CC-MAIN-00000.warc.gz", WarcRecordType.response)
    story = explain_document(result.config, f"crawl/CC-MAIN-00000.warc.gz#{next(iter(archive)).stream_pos}")
    assert f"url {SITE}/speech-0.html" in story
    assert "title Speech 0" in story
