"""The careful extraction finds the main text in the form that the fast one has, and says if it cannot run."""

import sys
from pathlib import Path

import pytest

from crosscut.config.corpora import CorpusConfig, Extraction, HtmlConfig, SourceConfig
from crosscut.config.errors import DataError
from crosscut.config.system.extras import install_command
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.ingest import FileShare, IngestStage, ingest_files
from crosscut.corpus.readers import ReaderSettings
from crosscut.corpus.readers.files import find_source
from tests.corpus.reads import read

SENTENCE = "The committee of the harbour met on Tuesday and agreed that the wall must be built again."
PAGE = f"""<html><head><title>The wall</title></head><body><nav><a href="/">Home</a></nav><main><article><h1>Stones</h1>
<p>{SENTENCE}
{SENTENCE}</p><p>{SENTENCE}<br>{SENTENCE}</p>
<pre><code>if wall.stands():

    build(wall)
</code></pre>
<ul><li>forty tons of stone</li><li>seven tons of sand</li></ul>
<table><tr><td>stone</td><td>{SENTENCE}</td></tr><tr><td>sand</td><td>7</td></tr></table>
<p>{SENTENCE}</p></article></main><div id="comments"><p>I do not agree with a word.</p></div></body></html>"""

TEXT = f"""Stones

{SENTENCE} {SENTENCE}

{SENTENCE}
{SENTENCE}

if wall.stands():

    build(wall)

forty tons of stone
seven tons of sand

stone\t\t{SENTENCE}
sand\t\t7

{SENTENCE}"""

needs_trafilatura = pytest.mark.skipif(
    "not __import__('importlib.util').util.find_spec('trafilatura')", reason="the extra `careful` is not installed"
)


def write(folder: Path, markup: str, name: str = "a.html") -> Path:
    (folder / name).write_text(markup)
    return folder / name


@needs_trafilatura
def test_paragraphs_are_set_off_by_blank_lines(tmp_path: Path) -> None:
    (item,) = read(write(tmp_path, PAGE), extraction=Extraction.CAREFUL)
    assert (item.title, item.note) == ("The wall", "")
    assert item.text == TEXT


@needs_trafilatura
def test_pages_on_which_it_fails_are_extracted_fast_and_counted(tmp_path: Path) -> None:
    write(tmp_path, PAGE)
    write(tmp_path, "<div>" * 2000 + SENTENCE, "b.html")
    (folder := tmp_path / "output").mkdir()
    files = tuple(find_source(SourceConfig(name="web", files=(str(tmp_path),), format="html")).files)
    share = FileShare("000000", "web", files, {}, ReaderSettings(extraction=Extraction.CAREFUL), 10**6)
    counts = ingest_files(share, Output(folder))
    assert (counts["documents_out"], counts["notes"]) == (2, {"fast extraction": 1})


def test_missing_library_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    source = SourceConfig(name="web", files=(str(write(tmp_path, PAGE)),))
    for extraction in Extraction:
        config = CorpusConfig(sources=(source,), folder="out", html=HtmlConfig(extraction=extraction))
        if extraction is Extraction.FAST:
            assert len(IngestStage(config=config).tasks(tmp_path)) == 1
            continue
        with pytest.raises(DataError) as raised:
            IngestStage(config=config).tasks(tmp_path)
    assert str(raised.value) == (
        '`html.extraction` "careful" needs the package trafilatura, but trafilatura is not installed. Run '
        f"`{install_command('careful')}`."
    )
