"""Records are the ones that another library finds, and damage hides no record but its own."""

import gzip
import io
import random
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from fastwarc.warc import ArchiveIterator

from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers import Reject
from crosscut.corpus.readers.archives.records import ArchiveRecord, read_records
from crosscut.corpus.readers.files import find_source
from tests.corpus.readers.archives.crawls import crawl, pack, page, response, write
from tests.corpus.reads import read, rejects, texts


def records_of(path: Path) -> list[ArchiveRecord | Reject]:
    (file,) = find_source(SourceConfig(name="web", files=(str(path),))).files
    return list(read_records(file, 10**6))


def some_pages(number: int) -> list[bytes]:
    """Responses whose texts do not compress well."""
    letters = random.Random(number)
    return [response(f"{n}", page("".join(letters.choices("abcdefgh ", k=400)) + f" end{n}")) for n in range(number)]


def kept(path: Path) -> list[str]:
    """Number of each page that was read, from the end of its text."""
    return [text.rpartition("end")[2] for text in texts(read(path))]


@pytest.mark.parametrize("suffix", [".warc", ".warc.gz"])
def test_records_are_those_of_fastwarc(tmp_path: Path, suffix: str) -> None:
    letters = random.Random(7)
    pages = [
        (f"p{n}", page("".join(letters.choices("abcdefgh \r\n", k=letters.choice([0, 9, 70_000]))))) for n in range(40)
    ]
    records = crawl(pages)
    path = write(tmp_path / f"a{suffix}", pack(records) if suffix == ".warc.gz" else b"".join(records))
    theirs = [
        (one.stream_pos, str(one.record_type), one.headers["WARC-Record-ID"], one.reader.read())
        for one in ArchiveIterator(io.BytesIO(path.read_bytes()), parse_http=False)
    ]
    ours = [one for one in records_of(path) if isinstance(one, ArchiveRecord)]
    assert [(one.number, one.kind, one.headers["warc-record-id"], one.content) for one in ours] == theirs
    assert len(ours) == 1 + 3 * 40


def test_header_lines_may_be_folded_repeated_and_of_latin_1(tmp_path: Path) -> None:
    head = b"WARC/1.0\nWARC-Type:  Response \nWARC-Target-URI: http://a/\n  caf\xe9\nA: 1\na: 2\nno colon\n"
    (one,) = records_of(write(tmp_path / "a.warc", head + b"Content-Length: 2\n\nhi\n\n"))
    assert (one.kind, one.headers["warc-target-uri"], one.headers["a"]) == ("response", "http://a/ café", "1, 2")
    assert one.content == b"hi"


def with_length(one: bytes, length: object) -> bytes:
    head, separator, content = one.partition(b"\r\n\r\n")
    lines = [b"Content-Length: %b" % str(length).encode() if line.startswith(b"Content-Length") else line
             for line in head.split(b"\r\n")]  # fmt: skip
    return b"\r\n".join(lines) + separator + content


@pytest.mark.parametrize("join", [b"".join, pack, lambda records: gzip.compress(b"".join(records))])
@pytest.mark.parametrize("length", [0, 20, 560, 700, 1500, 2 * 10**6, 10**17, -1, "many", "", "1" * 5000])
def test_record_with_a_wrong_length_is_the_only_one_lost(tmp_path: Path, join, length: object) -> None:
    records = some_pages(9)
    records[3] = with_length(records[3], length)
    data = join(records)
    path = write(tmp_path / ("a.warc.gz" if data.startswith(b"\x1f\x8b") else "a.warc"), data)
    assert kept(path) == [str(number) for number in range(9) if number != 3]
    assert [rule for _, rule in rejects(read(path))] == ["wrong length"]


@pytest.mark.parametrize("join", [b"".join, pack, lambda records: gzip.compress(b"".join(records))])
def test_length_beyond_the_file_is_damage_unless_each_record_is_compressed_on_its_own(tmp_path: Path, join) -> None:
    records = some_pages(200)
    records[3] = with_length(records[3], 10**17)
    data = join(records)
    path = write(tmp_path / ("a.warc.gz" if data.startswith(b"\x1f\x8b") else "a.warc"), data)
    (reject,) = [item for item in read(path) if isinstance(item, Reject)]
    if join is pack:
        assert kept(path) == [str(number) for number in range(200) if number != 3]
        assert (reject.rule, reject.lost) == ("wrong length", 0)
    else:
        assert kept(path) == ["0", "1", "2"]
        assert (reject.rule, reject.lost > len(data) // 2) == ("damaged file", True)


@pytest.mark.parametrize(
    "garbage", [b"x", b"garbage\r\n" * 40_000, bytes(range(256)) * 9, b"WARC/", b"WARC/1.0\r\nA: b"]
)
def test_garbage_between_records_is_one_reject(tmp_path: Path, garbage: bytes) -> None:
    records = some_pages(6)
    path = write(tmp_path / "a.warc", b"".join(records[:2]) + garbage + b"\r\n" + b"".join(records[2:]))
    assert kept(path) == list("012345")
    (reject,) = [item for item in read(path) if isinstance(item, Reject)]
    assert reject.place == f"byte {len(b''.join(records[:2]))}"
    assert reject.lost == 0


def test_file_that_is_no_archive_is_one_reject(tmp_path: Path) -> None:
    assert rejects(read(write(tmp_path / "a.warc", page("no record") * 9000))) == [("byte 0", "no record")]


@pytest.mark.parametrize("garbage", [b"x", b"garbage\r\n" * 40_000, b"\x1f\x8b\x08" * 99, b"\0" * 70_000])
def test_garbage_between_members_is_damage_and_the_records_behind_it_are_read(tmp_path: Path, garbage: bytes) -> None:
    records = some_pages(6)
    before = pack(records[:2])
    path = write(tmp_path / "a.warc.gz", before + garbage + pack(records[2:]))
    assert kept(path) == list("012345")
    (reject,) = [item for item in read(path) if isinstance(item, Reject)]
    assert (reject.place, reject.rule, reject.lost) == (f"byte {len(before)}", "damaged file", len(garbage))


@pytest.mark.parametrize("pack_one", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
@pytest.mark.parametrize("place", [0.2, 0.5, 0.9])
def test_damaged_member_loses_its_own_record(tmp_path: Path, pack_one, place: float) -> None:
    packed = [pack_one(one) for one in some_pages(9)]
    at = int(len(packed[3]) * place)
    packed[3] = packed[3][:at] + b"\xff" * 6 + packed[3][at + 6 :]
    path = write(tmp_path / f"a.warc{'.gz' if pack_one is gzip.compress else '.zst'}", b"".join(packed))
    found = kept(path)
    assert set(found) >= {"0", "1", "2", "5", "6", "7", "8"}
    (reject,) = [item for item in read(path) if isinstance(item, Reject)]
    assert (reject.place, reject.rule) == (f"byte {len(b''.join(packed[:3]))}", "damaged file")
    assert reject.lost >= len(packed[3])


@pytest.mark.parametrize("suffix", [".warc", ".warc.gz", ".warc.zst"])
@pytest.mark.parametrize("missing", [1, 5, 100, 400])
def test_truncated_file_keeps_the_records_before_the_end(tmp_path: Path, suffix: str, missing: int) -> None:
    records = some_pages(9)
    packed = {
        ".warc": b"".join,
        ".warc.gz": pack,
        ".warc.zst": lambda several: b"".join(map(zstandard.compress, several)),
    }[suffix]
    data = packed(records)
    path = write(tmp_path / f"a{suffix}", data[:-missing])
    whole = suffix == ".warc" and missing <= 4  # only line ends are missing
    assert kept(path) == [str(number) for number in range(9 if whole else 8)]
    found = [item for item in read(path) if isinstance(item, Reject)]
    assert [item.rule for item in found] == ([] if whole else ["damaged file"])
    if found:
        assert found[0].lost == len(packed(records[8:])) - missing


def test_empty_compressed_file_is_damaged_as_in_other_formats(tmp_path: Path) -> None:
    assert rejects(read(write(tmp_path / "a.warc.gz", b""))) == [("byte 0", "damaged file")]
    assert rejects(read(write(tmp_path / "a.jsonl.gz", b""))) == [("byte 0", "damaged file")]


def test_embedded_archive_is_content(tmp_path: Path) -> None:
    inner = b"".join(some_pages(3))
    records = [response("a.warc", inner, kind="application/warc"), response("b", page("end7"))]
    assert kept(write(tmp_path / "a.warc", b"".join(records))) == ["7"]


def test_header_without_an_end_is_no_record(tmp_path: Path) -> None:
    endless = b"WARC/1.0\r\n" + b"X: y\r\n" * 50_000
    path = write(tmp_path / "a.warc.gz", gzip.compress(endless) + pack(some_pages(2)))
    assert rejects(read(path)) == [("byte 0", "no record")]
    assert kept(path) == ["0", "1"]


MEMORY = """
import resource, sys
from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers import RawText, ReaderSettings, find_reader
from crosscut.corpus.readers.files import find_source

(file,) = find_source(SourceConfig(name="web", files=(sys.argv[1],))).files
reader = find_reader("warc")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = ["text" if isinstance(item, RawText) else item.rule for item in reader(file, ReaderSettings(max_bytes=10**6))]
print(*found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_record_of_50_mb_is_not_held(tmp_path: Path) -> None:
    long = [response("a", b"x" * 50 * 10**6), response("b", b"x" * 2 * 10**6, kind="video/mp4")]
    path = tmp_path / "a.warc.gz"
    with path.open("wb") as file:
        for one in (*long, response("c", page("kept"))):
            file.write(gzip.compress(one, 1))
    del long
    printed = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True,
                             cwd=Path(__file__).parents[4]).stdout  # fmt: skip
    found, _, grown = printed.rpartition(" ")
    assert found == "too long not HTML or text text"
    assert int(grown) < 25
