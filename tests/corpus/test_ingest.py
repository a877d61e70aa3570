"""Files to parts and rejects: what comes out, in what memory, and what is said when too much cannot be read."""

import bz2
import gzip
import json
import os
import pickle
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from crosscut.config import DataError
from crosscut.config.corpora import CorpusConfig, IngestConfig, SourceConfig, UrlsConfig
from crosscut.corpus.documents import DOCUMENTS, Part, read_table
from crosscut.corpus.execution.stages import TaskRecord, add_counts, execute
from crosscut.corpus.ingest import SLOWNESS, TASK_BYTES, IngestStage, check_damage, check_rejects, ingest_files
from tests.corpus.ingested import source
from tests.refusals import refusal


def corpus(folder: Path, *sources: SourceConfig, **ingest: Any) -> CorpusConfig:
    return CorpusConfig(sources=sources, folder=str(folder / "corpus"), ingest=IngestConfig(**ingest))


def run(config: CorpusConfig) -> list[TaskRecord]:
    work = Path(config.folder) / "work"
    tasks = [pickle.loads(pickle.dumps(task)) for task in IngestStage(config=config).tasks(work)]
    return [execute(work / "ingest", task, "key") for task in tasks]


def documents(config: CorpusConfig, records: list[TaskRecord]) -> list[tuple[str, str]]:
    work = Path(config.folder) / "work"
    names = sorted(name for record in records for name in record.counts["parts"])
    return [(document.id, document.text) for name in names for document in Part(work, name).documents()]


def rejects(config: CorpusConfig, records: list[TaskRecord]) -> list[dict[str, str]]:
    folder = Path(config.folder) / "work" / "ingest"
    paths = [folder / f"{record.task}.rejects.jsonl" for record in records]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def write_jsonl(path: Path, texts: list[str], *more: bytes) -> Path:
    path.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts) + b"".join(more))
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> CorpusConfig:
    """Two sources with something wrong in each."""
    write_jsonl(tmp_path / "web.jsonl", ["one", "", "two"], b"{broken\n", b'{"text": "naive \xc3\xaf"}\n')
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a note")
    (tmp_path / "notes" / "b.txt").write_bytes(b"caf\xe9")
    return corpus(tmp_path, source("web", tmp_path / "web.jsonl"), source("notes", tmp_path / "notes"), max_rejects=0.9)


def test_documents_are_known_by_source_file_and_record(mixed: CorpusConfig) -> None:
    assert documents(mixed, run(mixed)) == [
        ("web/web.jsonl#1", "one"),
        ("web/web.jsonl#3", "two"),
        ("web/web.jsonl#5", "naive ï"),
        ("notes/a.txt#1", "a note"),
    ]


def test_rejects_name_file_place_and_reason(mixed: CorpusConfig) -> None:
    first, second = rejects(mixed, run(mixed))
    folder = Path(mixed.folder).parent
    assert first == {
        "source": "web",
        "name": "web/web.jsonl",
        "file": str(folder / "web.jsonl"),
        "place": "line 4",
        "rule": "not JSON",
        "reason": "Expecting property name enclosed in double quotes at column 2",
        "excerpt": "{broken",
    }
    assert (second["file"], second["place"]) == (str(folder / "notes" / "b.txt"), "byte 3")


def test_counts_of_all_that_went_in_and_out(mixed: CorpusConfig) -> None:
    counts = add_counts([record.counts for record in run(mixed)])
    web, notes = (Path(mixed.folder).parent / "web.jsonl").stat().st_size, len(b"a note" + b"caf\xe9")
    assert counts == {
        "documents_in": 7,
        "documents_out": 4,
        "bytes_in": web + notes,
        "bytes_out": len("onetwonaive ï a note".encode()) - 1,
        "rules": {
            "blank": {"documents": 1, "bytes": 0},
            "not JSON": {"documents": 1, "bytes": 0},
            "not UTF-8": {"documents": 1, "bytes": 0},
        },
        "notes": {},
        "parts": {"000000-0000": 14, "000001-0000": 6},
        "damaged": [],
        "sources": {
            "web": {"files": 1, "bytes_in": web, "records": 4, "rejects": 1, "lost": 0, "documents": 3, "bytes": 14},
            "notes": {"files": 2, "bytes_in": notes, "records": 2, "rejects": 1, "lost": 0, "documents": 1, "bytes": 6},
        },
    }


def test_replaced_characters_are_counted_with_their_documents(tmp_path: Path) -> None:
    text = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 9
    for name, broken in (("a", b"\xff \xfe"), ("b", b"\xff"), ("c", b"")):
        body = f"<meta charset=Shift_JIS><p>{text}".encode("cp932") + broken
        (tmp_path / f"{name}.html").write_bytes(body)
    config = corpus(tmp_path, source("web", tmp_path / "*.html"))
    records = run(config)
    assert add_counts([record.counts for record in records])["notes"] == {
        "replaced characters": 3,
        "with replaced characters": 2,
    }
    assert [text.count("\ufffd") for _, text in documents(config, records)] == [2, 1, 0]


def test_parts_have_all_columns_and_about_the_size_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"text": "x" * 1000, "url": "https://a.org", "karma": 4, "title": "A"}
    path.write_text("".join(json.dumps({**row, "text": f"{n:04} {row['text']}"}) + "\n" for n in range(2500)))
    config = corpus(tmp_path, source("web", path), part_mb=1)
    records = run(config)
    assert list(records[0].counts["parts"].values()) == [1_000_000 // 1005 * 1005 + 1005] * 2 + [
        2500 * 1005 - 2_001_960
    ]
    folder = Path(config.folder) / "work" / "ingest"
    tables = [read_table(folder / f"{name}.arrow") for name in records[0].counts["parts"]]
    assert all(table.schema == DOCUMENTS for table in tables)
    (first,) = tables[0].slice(0, 1).to_pylist()
    assert first == {"id": "web/a.jsonl#1", "text": "0000 " + "x" * 1000, "url": row["url"], "karma": 4.0, "title": "A"}


def test_same_files_and_settings_give_the_same_bytes(mixed: CorpusConfig) -> None:
    assert [record.files for record in run(mixed)] == [record.files for record in run(mixed)]


def test_what_a_task_depends_on(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])

    def settings(config: CorpusConfig) -> object:
        (task,) = IngestStage(config=config).tasks(tmp_path)
        return json.loads(json.dumps(dict(task.settings)))

    before = settings(corpus(tmp_path, source("web", path)))
    same = corpus(tmp_path, source("web", path, weight=2.0, cleaners=("join_lines",)), max_rejects=0.5)
    assert settings(same) == before
    assert settings(corpus(tmp_path, source("web", path), part_mb=2)) != before
    assert settings(corpus(tmp_path, source("web", path), max_document_mb=2)) != before
    assert settings(corpus(tmp_path, source("web", path, text_key="body"))) != before
    write_jsonl(path, ["two"])
    assert settings(corpus(tmp_path, source("web", path))) != before


def test_files_are_shared_out_in_order_and_slow_formats_in_smaller_shares(tmp_path: Path) -> None:
    def sizes(kind: str, size: int) -> list[int]:
        folder = tmp_path / kind
        folder.mkdir()
        for n in range(5):
            with (folder / f"{n}.{kind}").open("wb") as file:
                file.truncate(size)
        tasks = IngestStage(config=corpus(tmp_path, source("web", folder))).tasks(tmp_path)
        names = [name for task in tasks for name, *_ in task.settings["files"]]
        assert names == [f"{n}.{kind}" for n in range(5)]
        assert [task.name for task in tasks] == [f"{n:06d}" for n in range(len(tasks))]
        return [task.size // size for task in tasks]

    assert sizes("jsonl", TASK_BYTES // 2) == [2, 2, 1]
    assert sizes("html", TASK_BYTES // SLOWNESS["html"] // 3) == [3, 2]
    assert sizes("txt", TASK_BYTES * 2) == [1] * 5


def test_few_rejects_pass(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["text"] * 99, b"{broken\n")
    config = corpus(tmp_path, source("web", path), max_rejects=0.01)
    check_rejects(run(config), config)


def test_too_many_rejects_of_one_source_are_an_error_that_names_the_first(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["text"] * 1000)
    bad = write_jsonl(tmp_path / "bad.jsonl", ["text"] * 18, b"{broken\n", b"7\n")
    config = corpus(tmp_path, source("web", good), source("forum", bad), max_rejects=0.05)
    assert refusal(DataError, check_rejects, run(config), config) == (
        "`ingest.max_rejects` allows 5.0% of the source `forum` to be unreadable, but 2 of 20 records (10.0%) cannot "
        "be read. Repair the files, or raise `ingest.max_rejects`. "
        f"First reject: `{bad}`, line 19: Expecting property name enclosed in double quotes at column 2. "
        f"All rejects are in `{config.folder}/work/ingest`."
    )


def test_truncated_file_is_one_reject_and_its_documents_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    write_jsonl(path, ["".join(chr(97 + n * k % 26) for k in range(300)) for n in range(3000)])
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    config = corpus(tmp_path, source("web", path))
    records = run(config)
    check_rejects(records, config)
    (reject,) = rejects(config, records)
    assert (reject["file"], reject["place"]) == (str(path), f"byte {len(packed) // 2}")
    assert len(documents(config, records)) > 1000


def test_damaged_file_counts_by_the_bytes_that_are_lost(tmp_path: Path) -> None:
    """Its one reject among thousands of records must not pass for a small loss."""
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(write_jsonl(tmp_path / "a.jsonl", ["text"] * 3000).read_bytes())
    path.write_bytes(packed + b"no such data" * 10_000)
    config = corpus(tmp_path, source("web", path))
    records = run(config)
    assert len(documents(config, records)) == 3000
    with pytest.raises(DataError) as error:
        check_rejects(records, config)
    assert f"of {path.stat().st_size:,} bytes (" in str(error.value)
    assert f"`{path}`, byte " in str(error.value)


def halve(path: Path) -> int:
    """Cut a file in the middle of a record or of packed data. Gives the file's new size."""
    os.truncate(path, path.stat().st_size // 2 - 3)
    return path.stat().st_size


def write_packed(path: Path, texts: list[str]) -> Path:
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, use_dictionary=False, compression=None)
    return path


def spoil(path: Path) -> None:
    """Overwrite bytes in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 3000)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "write", "harm"),
    [
        ("a.jsonl.gz", write_packed, halve),
        ("a.jsonl.zst", write_packed, halve),
        ("a.jsonl.bz2", write_packed, halve),
        ("a.jsonl", write_packed, halve),
        ("a.jsonl.zst", write_packed, spoil),
        ("a.parquet", write_parquet, halve),
        ("a.parquet", write_parquet, spoil),
    ],
)
def test_damaged_file_stops_the_run_unless_it_is_allowed(tmp_path: Path, name: str, write, harm) -> None:
    """However few its rejects are: nobody knows how many documents it has lost."""
    letters = random.Random(1)
    texts = ["".join(letters.choices("abcdefgh", k=2000)) for _ in range(400)]
    good = write_jsonl(tmp_path / "good.jsonl", ["text"] * 3000)
    path = write(tmp_path / name, texts)
    harm(path)
    config = corpus(tmp_path, source("web", good, path), max_rejects=0.9)
    records = run(config)
    check_rejects(records, config)
    (damaged,) = records[0].counts["damaged"]
    kept = sum(1 for name, _ in documents(config, records) if "good" not in name)
    assert kept < 400
    with pytest.raises(DataError) as error:
        check_damage(records, config)
    told = str(error.value)
    assert told.startswith(
        "`ingest.max_damaged_files` allows 0 damaged files, but the corpus has 1. First damaged file: "
    )
    assert f": `{path}`, {damaged['place']}, after {damaged['documents']:,} documents: " in told
    assert damaged["documents"] <= kept
    check_damage(records, corpus(tmp_path, source("web", good, path), max_damaged_files=1))


def test_last_line_without_an_end_is_whole_if_it_is_json(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one"], b'{"text": "two"}')
    config = corpus(tmp_path, source("web", path))
    records = run(config)
    check_damage(records, config)
    assert [text for _, text in documents(config, records)] == ["one", "two"]


def test_parquet_files_of_other_schemas_leave_the_good_ones(tmp_path: Path) -> None:
    for name, columns in (
        ("a", {"text": ["one"]}),
        ("b", {"body": ["lost"]}),
        ("c", {"text": [1]}),
        ("d", {"text": ["two"]}),
    ):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    config = corpus(tmp_path, source("web", tmp_path))
    records = run(config)
    assert documents(config, records) == [("web/a.parquet#1", "one"), ("web/d.parquet#1", "two")]
    with pytest.raises(DataError, match=r"/b\.parquet`, row 1: there is no column `text`; the columns are: body\."):
        check_rejects(records, config)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": " "}\n'])
def test_source_without_any_document_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    config = corpus(tmp_path, source("web", tmp_path / "a.jsonl"))
    assert refusal(DataError, check_rejects, run(config), config) == (
        "The source `web` must contain documents, but its files (1 in total) contain none. Check `files` and `format`, "
        "or remove the source."
    )


def test_tasks_of_a_crawl_depend_on_the_lists_of_urls(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(b"")
    write_jsonl(tmp_path / "a.jsonl", ["text"])
    (tmp_path / "domains.txt").write_text("bad.example\n")
    urls = UrlsConfig(domains=(str(tmp_path / "domains.txt"),))
    sources = (source("crawl", tmp_path / "a.warc"), source("web", tmp_path / "a.jsonl"))
    config = replace(corpus(tmp_path, *sources), urls=urls)
    crawl, web = IngestStage(config=config).tasks(tmp_path)
    (tmp_path / "domains.txt").write_text("bad.example\nworse.example\n")
    later_crawl, later_web = IngestStage(config=config).tasks(tmp_path)
    assert later_crawl.settings != crawl.settings
    assert later_web.settings == web.settings


def test_each_file_of_a_crawl_is_a_task(tmp_path: Path) -> None:
    for name in ("a.warc.gz", "b.warc.gz", "c.warc.gz"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(5_000_000)
    tasks = IngestStage(config=corpus(tmp_path, source("crawl", tmp_path))).tasks(tmp_path)
    assert [[name for name, *_ in task.settings["files"]] for task in tasks] == [
        ["a.warc.gz"],
        ["b.warc.gz"],
        ["c.warc.gz"],
    ]


def test_files_that_are_left_out_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscut.corpus.ingest.TASK_BYTES", 40_000)
    for name in ("a.html", "b.html", "logo.png", "style.css"):
        (tmp_path / name).write_bytes(b"<p>text")
    config = corpus(tmp_path, source("web", tmp_path, format="html"))
    records = run(config)
    assert len(records) == 2
    counts = add_counts([record.counts for record in records])
    assert counts["left_out"] == {"web": {".css": 1, ".png": 1}}
    before = IngestStage(config=config).tasks(tmp_path)
    (tmp_path / "new.png").write_bytes(b"")
    after = IngestStage(config=config).tasks(tmp_path)
    assert [one.settings == other.settings for one, other in zip(before, after, strict=True)] == [False, True]


def test_megatron_source_needs_its_tokenizer(tmp_path: Path) -> None:
    for suffix in ("idx", "bin"):
        (tmp_path / f"a.{suffix}").write_bytes(b"")
    stage = IngestStage(config=corpus(tmp_path, source("old", tmp_path / "a.idx")))
    assert refusal(DataError, stage.tasks, tmp_path) == (
        f"`tokens.tokenizer` must name the tokenizer that `{tmp_path}/a.idx` was made with, but is empty. "
        "Set the path of that `tokenizer.json`."
    )


@contextmanager
def disk_takes(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("room", [0, 100, 1_500_000])
def test_disk_that_takes_no_more_stops_the_task_and_leaves_nothing_of_it(tmp_path: Path, room: int) -> None:
    letters = random.Random(1)
    path = write_jsonl(
        tmp_path / "a.jsonl", ["".join(letters.choices("abcdefgh", k=10_000)) for _ in range(400)], b"{\n"
    )
    config = corpus(tmp_path, source("web", path), part_mb=3)
    with disk_takes(room), pytest.raises(DataError) as error:
        run(config)
    folder = Path(config.folder) / "work" / "ingest"
    assert str(error.value).startswith(f"`{folder}` must be writable, but writing failed: ")
    assert {path.name for path in folder.iterdir()} <= {".crosscut"}
    assert len(documents(config, run(config))) == 400


def test_text_that_is_much_longer_than_its_record_is_rejected(tmp_path: Path) -> None:
    page = "<page><title>T</title><ns>0</ns><id>1</id><revision><text>%s</text></revision></page>"
    articles = page % ("{{convert|9|km|mi}} " * 90) + page % "short"
    (tmp_path / "a.xml").write_text(f"<mediawiki xml:lang='en'>{articles}</mediawiki>")
    config = corpus(tmp_path, source("wiki", tmp_path / "a.xml"))
    (task,) = IngestStage(config=config).tasks(tmp_path)
    (share,) = task.function.args
    share = share._replace(reading=replace(share.reading, max_bytes=1900))
    work = Path(config.folder) / "work"
    records = [execute(work / "ingest", replace(task, function=partial(ingest_files, share)), "key")]
    assert documents(config, records) == [("wiki/a.xml#2", "short")]
    (reject,) = rejects(config, records)
    assert (reject["place"], reject["rule"]) == ("record 1", "too long")
    assert reject["reason"] == "the text is longer than 0.0019 MB (`ingest.max_document_mb`)"


MEMORY = """
import resource, sys
from pathlib import Path
from crosscut.config.corpora import CorpusConfig, IngestConfig, SourceConfig, UrlsConfig
from crosscut.corpus.ingest import IngestStage
from crosscut.corpus.execution.stages import execute

path, folder, longest = sys.argv[1:]
source = SourceConfig(name="web", files=(path,))
config = CorpusConfig(sources=(source,), folder=folder, ingest=IngestConfig(max_document_mb=int(longest)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(task,) = IngestStage(config=config).tasks(Path(folder))
counts = execute(Path(folder), task, "key").counts
print(counts["documents_out"], counts["rules"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def check_long_line(tmp_path: Path, *, line_mb: int, longest_mb: int, limit_mb: int, suffix: str = "") -> None:
    """Ingest a file whose second line of three is too long, in a process whose memory is looked at."""
    path = tmp_path / f"a.jsonl{suffix}"
    with gzip.open(path, "wb", 1) if suffix else path.open("wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        for _ in range(line_mb):
            file.write(b"x" * 10**6)
        file.write(b'"}\n{"text": "after"}\n')
    command = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "out"), str(longest_mb)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    found, _, grown = printed.rpartition(" ")
    assert found == "2 {'too long': {'documents': 1, 'bytes': 0}}"
    assert int(grown) < limit_mb * 1024


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_line_that_is_too_long_is_not_held(tmp_path: Path, suffix: str) -> None:
    check_long_line(tmp_path, line_mb=40, longest_mb=1, limit_mb=25, suffix=suffix)
