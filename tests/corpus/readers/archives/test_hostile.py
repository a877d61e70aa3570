"""Archives made of repeated pieces are read in time that grows with their length."""

import gzip
import time
from pathlib import Path

import pytest
import zstandard

from crosscut.corpus.readers import RawText
from crosscut.corpus.readers.archives.headers import split_head
from crosscut.corpus.readers.archives.responses import parse_response
from tests.corpus.readers.archives.crawls import http, page, response
from tests.corpus.reads import read, rejects, texts

MANY = 4000
PADDING = bytes(8_000_000)
GOOD = response("good.html", page("The last page."))


def lie(length: int) -> bytes:
    return b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: %d\r\n\r\n\r\n\r\n" % length


HOSTILE = {
    "carriage returns in a response": response("a", b"", "\r" * 80_000),
    "carriage returns in a record": b"WARC/1.0\r\n" + b"\r" * 80_000 + b"\n",
    "carriage returns and line ends": response("a", b"", ("\r" * 200 + "\n ") * 200),
    "lines of one name": response("a", b"", "a: b\r\n" * 20_000),
    "folded lines": response("a", b"", "a: b" + "\r\n c" * 20_000),
    "encodings": response("a", b"plain", "Content-Encoding: " + "gzip," * 20_000),
    "types": response("a", page("a"), kind="text/html" + ";charset=" * 20_000),
    "first lines": b"WARC/1.0\r\n" * 3 * MANY,
    "garbage": b"x\nWARC/1.0\n" * 3 * MANY,
    "lengths beyond the end": lie(60_000_000) * MANY + PADDING,
    "lengths within the file": lie(8_000_000) * MANY + PADDING,
    "lengths that end elsewhere": b"".join(lie(37 * (MANY - number) + 13) for number in range(MANY)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archive_is_read_in_a_moment(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.warc").write_bytes(HOSTILE[kind] + b"\r\n\r\n" + GOOD)
    start = time.process_time()
    assert texts(read(tmp_path / "a.warc"))[-1] == "The last page."
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".gz", b"\x1f\x8b\x08"), (".gz", b"\x1f\x8b\x08\x08nnnnnn"), (".zst", b"\x28\xb5\x2f\xfd")]
)
def test_search_for_the_next_member_is_bounded(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    path = tmp_path / f"a.warc{suffix}"
    path.write_bytes(pack(GOOD) + b"x" + magic * 80_000 + pack(GOOD))
    start = time.process_time()
    items = read(path)
    assert time.process_time() - start < 3
    assert texts(items)[0] == "The last page."
    assert "damaged file" in [rule for _, rule in rejects(items)]


def test_run_of_first_lines_is_one_piece_of_garbage(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(GOOD + b"WARC/1.0\r\n" * 500 + GOOD)
    items = read(tmp_path / "a.warc")
    assert texts(items) == ["The last page."] * 2
    assert [rule for _, rule in rejects(items)] == ["no record"]


def test_damaged_member_with_few_false_starts_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"x" + b"\x1f\x8b\x08" * 100 + gzip.compress(GOOD))
    assert texts(read(path)) == ["The last page."]


def test_record_after_a_wrong_length_is_found_though_a_later_record_ends_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(lie(300) + GOOD + lie(10**9) + GOOD)
    items = read(tmp_path / "a.warc")
    assert [rule for _, rule in rejects(items)] == ["wrong length", "wrong length"]
    assert len([item for item in items if isinstance(item, RawText)]) == 2


def test_lines_of_a_header_are_joined() -> None:
    head = b"HTTP/1.1 200 OK\r\nA: 1\r\n\t2\r\n   \r\nB:\r\n 3\r\nno colon\r\r\na: 4\r\n"
    assert split_head(head) == ("HTTP/1.1 200 OK", {"a": "1 2, 4", "b": "3"})


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r\n\r\r\n", b"\n\r\n"])
def test_body_begins_after_the_first_blank_line(end: bytes) -> None:
    parsed = parse_response(b"HTTP/1.1 200 OK" + end + b"body\n\n")
    assert parsed is not None
    assert parsed.body == b"body\n\n"
    assert parse_response(http(b"\r\n\r\nbody")).body == b"\r\n\r\nbody"  # type: ignore[union-attr]
