"""Totals of a corpus in which everything goes wrong that can: the terminal, the page and `--explain` agree on it."""

import gzip
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from crosscut.config.corpora import CorpusConfig, IngestConfig, LanguageConfig, LeakageConfig, LengthConfig
from crosscut.corpus import explain_document, prepare_corpus, print_summary
from crosscut.corpus.audit.totals import cut_words, make_totals
from tests.corpus.audit.conftest import check_sums, texts
from tests.corpus.ingested import small_corpus, source

LEAKED = "we hold that nobody has ever said these very words to a congress of any country at all"


def write_sources(folder: Path) -> None:
    """Write pages with the same names, rows, notes and a mail, with damage, duplicates, blanks, and a leak."""
    speeches = list(texts()[:60])

    def row(text: Any) -> str:
        return json.dumps({"text": text})

    for place in ("book", "reference"):
        (folder / place).mkdir()
        (folder / place / "print.html").write_text(f"<html><body><main><p>{speeches.pop()}</p></main></body></html>")
    (folder / "reference" / "empty.html").write_text("<html><body></body></html>")
    near = speeches[2].replace("the", "that", 3)
    short = f"Too few words before. {LEAKED}. {speeches[4]}{speeches[5]}"
    foreign = "Se\u00f1or presidente, la situaci\u00f3n de la Uni\u00f3n es buena, y as\u00ed ser\u00e1. " * 20
    rows = [*speeches[:40], near, speeches[3], f"{speeches[6]} {LEAKED}. {speeches[7]}", short, foreign, "Short.", " "]
    (folder / "rows.jsonl").write_text("\n".join([*map(row, rows), row(None), "{broken"]) + "\n")
    packed = gzip.compress(
        "".join(row(f"{text} {number}") + "\n" for number, text in enumerate(speeches[40:])).encode()
    )
    (folder / "damaged.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text(texts()[60])
    (folder / "notes" / "blank.txt").write_text(" \n")
    (folder / "book" / "cut.html").write_bytes(f"<meta charset=utf-8><p>“Quotes” {texts()[62]}".encode() + b"\xe2\x80")
    (folder / "notes" / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (folder / "a.eml").write_text("Subject: nothing\n\n")
    (folder / "b.eml").write_text(f"Subject: something\n\n{texts()[61]}\n")
    (folder / "test.txt").write_text(f"A test says: {LEAKED}.\n")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[CorpusConfig, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mixed")
    write_sources(folder)

    paths = {"pages": ("book/*.html", "reference/*.html"), "rows": ("rows.jsonl", "damaged.jsonl.gz")}
    paths |= {"notes": ("notes",), "mail": ("*.eml",)}
    config = small_corpus(
        folder / "corpus",
        *(source(name, *map(folder.joinpath, own)) for name, own in paths.items()),
        ingest=IngestConfig(max_rejects=0.9, max_damaged_files=1),
        leakage=LeakageConfig(test_sets=(str(folder / "test.txt"),), margin=0),
        language=LanguageConfig(),
        length=LengthConfig(),
    )
    return config, prepare_corpus(config, progress=False).report


def printed(config: CorpusConfig, report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(config, report, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def samples(rules: dict[str, Any], *more: dict[str, Any]) -> Sequence[str]:
    return [one["id"] for rule in (*rules.values(), *more) for one in rule["samples"]]


def test_totals_add_up_to_the_records_in_the_files(corpus):
    _, report = corpus
    totals = report["summary"]
    check_sums(report["flow"])
    assert totals["unreadable"]["documents"] == report["rejects"] == 4  # null, broken, picture, damage
    assert totals["skipped"]["documents"] == 4  # page, row, note and mail without text
    lost = totals["unreadable"]["documents"] + totals["skipped"]["documents"]
    assert totals["found"] == {"documents": totals["read"]["documents"] + lost, "files": 11}
    assert totals["read"]["documents"] == totals["kept"]["documents"] + totals["dropped"]["documents"]
    rules = report["flow"][0]["rules"].values()
    assert sum(rule["documents"] for rule in rules if rule["kind"] == "unreadable") == 4
    assert sum(rule["documents"] for rule in rules if rule["kind"] == "skipped") == 4


def test_terminal_and_page_show_the_same_numbers_and_words(corpus, browser):
    config, report = corpus
    totals, told = report["summary"], printed(config, report)
    read, kept = (f"{totals[name]['documents']:,}" for name in ("read", "kept"))
    assert re.search(rf"read +{read} documents, [\d.]+ MB {re.escape(totals['words']['read'])}", told)
    assert re.search(rf"kept +{kept} documents, [\d.]+ MB; {re.escape(totals['words']['kept'])}", told)
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.goto((Path(config.folder) / "report.html").as_uri())
    cards = {card.locator(".kind").inner_text(): card for card in page.locator(".card").all()}
    assert cards["Read"].locator("strong").inner_text() == read
    assert cards["Read"].inner_text().endswith(f"documents {totals['words']['read']}")
    assert cards["Kept"].inner_text().endswith(f"{kept} of {read} documents; {totals['words']['kept']}")
    ingest = page.locator("#stage-ingest")
    assert totals["words"]["replaced"] == "1 character in 1 document, which the charsets of the documents cannot decode"
    assert totals["words"]["replaced"] in told
    assert totals["words"]["replaced"] in ingest.inner_text()
    assert ingest.locator(".amounts").inner_text() == f"{totals['found']['documents']:,} found, {read} read"
    assert "1 file was read only up to the damage" in ingest.inner_text()
    assert page.locator(".flow a").first.get_attribute("aria-label").endswith(f", {read} read")
    rows = dict(re.findall(r"^(\w[\w-]*) +([\d,]+) +[\d.]+ .*$", told, re.MULTILINE))
    for entry in report["flow"]:
        left = page.locator(f"#stage-{entry['stage']} .amounts strong").inner_text()
        assert rows[entry["stage"]] == left, entry["stage"]
        for rule, amount in entry["rules"].items():
            assert f"{amount['documents']:,} {rule}" in told
        if "cut" in entry:
            assert entry["cut"]["words"] in told
            assert entry["cut"]["words"] in page.locator(f"#stage-{entry['stage']}").inner_text()
    page.close()


def test_every_loss_has_samples_that_can_be_explained(corpus):
    config, report = corpus
    folder = Path(config.folder).parent
    lossy = [entry["stage"] for entry in report["flow"] if entry["rules"] or "cut" in entry]
    assert lossy == ["ingest", "language", "length", "exact", "near", "leakage", "tokens"]
    for entry in report["flow"]:
        for amount in (*entry["rules"].values(), *([entry["cut"]] if "cut" in entry else [])):
            assert len(amount["samples"]) >= min(amount.get("documents", amount.get("pieces")), 5), entry["stage"]
        for name in samples(entry["rules"]):
            story = explain_document(config, name)
            assert str(folder) in story
            assert re.search(r"^(not read|skipped) |dropped: ", story, re.MULTILINE), story
        for name in samples({}, *([entry["cut"]] if "cut" in entry else [])):
            assert re.search(r"cut out: characters|pieces between cuts were left out", explain_document(config, name))


def test_files_of_the_same_name_are_told_apart(corpus):
    config, _ = corpus
    for name, path in (("print.html", "book/print.html"), ("reference/print.html", "reference/print.html")):
        story = explain_document(config, f"pages/{name}#1")
        assert f"file            {Path(config.folder).parent / path}, record 1\n" in story


@pytest.mark.slow  # prepares a corpus three times
def test_ids_of_another_version_are_read_again_and_not_mixed(corpus, tmp_path):
    """A second run without the first entry renames the files of the other entry, and reads only these again."""
    config, _ = corpus
    pages, *others = config.sources
    changed = replace(config, folder=str(tmp_path / "out"), sources=(pages, *others))
    prepare_corpus(changed, progress=False)
    fewer = replace(changed, sources=(replace(pages, files=pages.files[1:]), *others))
    prepare_corpus(fewer, progress=False)
    assert "reference/print.html, record 1" in explain_document(fewer, "pages/print.html#1")
    again = prepare_corpus(fewer, progress=False)
    assert not [stage.name for stage in again.stages if stage.num_run]


def test_words_name_only_what_happened():
    entry = {"stage": "ingest", "in": {"documents": 1}, "out": {"documents": 1, "bytes": 9}, "rules": {}}
    totals = make_totals([entry], {"sources": {"web": {"rejects": 0, "files": 1}}})
    assert totals["words"] == {"read": "from 1 record in 1 file", "kept": "0 dropped"}
    assert make_totals([], {}) == {}
    assert make_totals([{**entry, "stage": "near"}], {})["words"] == {"kept": "0 dropped"}
    assert cut_words({"places": 2, "documents": 1, "bytes": 20_000}) == "2 passages cut out of 1 document, 0.020 MB"
    assert cut_words({"pieces": 1, "bytes": 20}) == "1 short piece left out, 20 B"
