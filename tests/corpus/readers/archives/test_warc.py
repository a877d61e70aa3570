"""Pages of a crawl become documents, and every other record is counted under its own name."""

import gzip
import zlib
from collections import Counter
from pathlib import Path

import brotli
import pytest
import zstandard

from crosscut.config.corpora import UrlsConfig
from crosscut.corpus.readers import RawText, Skip
from crosscut.corpus.readers.html import MAX_PAGE_BYTES
from tests.corpus.readers.archives.crawls import SITE, crawl, http, pack, pack_zstd, page, record, response, write
from tests.corpus.reads import read, rejects, skips, texts

RUSSIAN = "Лишь жить в себе самом умей; есть целый мир в душе твоей таинственно-волшебных дум."  # noqa: RUF001 - letters of Russian
FRENCH = "Le café était fermé, et le garçon s'en allait à l'école."


def of(folder: Path, *records: bytes, **options: object) -> list[object]:
    """Items of an archive of these records."""
    return read(write(folder / "a.warc.gz", pack(records)), **options)


@pytest.mark.parametrize("suffix", [".warc", ".warc.gz", ".warc.zst"])
def test_pages_of_a_crawl_are_documents_with_url_title_and_offset(tmp_path: Path, suffix: str) -> None:
    records = crawl((f"p{number}.html", page(f"Text of page {number}.", f"Title {number}")) for number in range(3))
    packed = {
        ".warc": b"".join,
        ".warc.gz": pack,
        ".warc.zst": lambda several: pack_zstd(several, b"WARC-Type: response " * 9),
    }
    data = packed[suffix](records)
    path = write(tmp_path / f"CC-MAIN-20261126000000-00000{suffix}", data)
    items = read(path)
    found = [item for item in items if isinstance(item, RawText)]
    assert [(item.text, item.title, item.url) for item in found] == [
        (f"Text of page {number}.", f"Title {number}", f"{SITE}/p{number}.html") for number in range(3)
    ]
    assert skips(items) == ["warcinfo record", *["request record", "metadata record"] * 3]
    for item, written in zip(found, records[2::3], strict=True):
        rest = data[item.record :]
        unpacked = rest if suffix == ".warc" else b""
        if suffix == ".warc.gz":
            unpacked = zlib.decompressobj(31).decompress(rest)
        if suffix != ".warc.zst":
            assert unpacked.startswith(written)
    assert found[-1].position <= len(data)


def test_offset_is_where_a_zstd_frame_begins(tmp_path: Path) -> None:
    frames = [zstandard.compress(one) for one in crawl([("a", page("one")), ("b", page("two"))])]
    found = [item for item in read(write(tmp_path / "a.warc.zst", b"".join(frames))) if isinstance(item, RawText)]
    assert [item.record for item in found] == [len(b"".join(frames[:2])), len(b"".join(frames[:5]))]


def test_file_that_was_compressed_as_a_whole_numbers_its_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.warc.gz", gzip.compress(b"".join(crawl([("a", page("one")), ("b", page("two"))]))))
    assert [item.record for item in read(path) if isinstance(item, RawText)] == [2, 5]


def test_records_that_are_not_pages_are_counted_by_name(tmp_path: Path) -> None:
    items = of(
        tmp_path,
        record("revisit", http(b""), f"{SITE}/a"),
        record("resource", b"x", f"{SITE}/a"),
        record("conversion", b"x", f"{SITE}/a"),
        record("continuation", b"x", f"{SITE}/a"),
        record("unknown", b"x", f"{SITE}/a"),
        record("response", b"20261126\n", "dns:example.org", Content_Type="text/dns"),
        record("response", http(page("cut")), f"{SITE}/a", WARC_Truncated="length"),
        record("response", http(page("first part")), f"{SITE}/a", WARC_Segment_Number="1"),
        record("response", b"a file", "ftp://example.org/a", Content_Type="application/octet-stream"),
        response("a", page("gone"), status="404 Not Found"),
        response("a", page("moved"), status="301 Moved Permanently"),
        response("a", b"{}", kind="application/json"),
        response("a", page("  ")),
        response("a", b"<frameset cols='1,2'><frame src=b></frameset>"),
    )
    assert Counter(skips(items)) == {
        "revisit record": 1,
        "resource record": 1,
        "conversion record": 1,
        "continuation record": 1,
        "unknown record": 1,
        "dns record": 1,
        "truncated record": 1,
        "segmented record": 1,
        "not HTTP": 1,
        "status not 200": 2,
        "not HTML or text": 1,
        "blank": 1,
        "frameset": 1,
    }
    assert texts(items) == []
    assert rejects(items) == []


def test_media_type_decides_and_content_if_there_is_none(tmp_path: Path) -> None:
    identified = {"WARC_Identified_Payload_Type": "application/xhtml+xml"}
    items = of(
        tmp_path,
        response("a", page("xhtml"), kind="application/xhtml+xml; charset=utf-8"),
        response("a", b"plain & <b>simple", kind="Text/Plain"),
        response("a", page("told by its tags"), kind=""),
        response("a", b"\x89PNG\r\n", kind=""),
        record("response", http(b"told by the crawler", kind=""), f"{SITE}/a", **identified),
    )
    assert texts(items) == ["xhtml", "plain & <b>simple", "told by its tags", "told by the crawler"]
    assert skips(items) == ["not HTML or text"]


def test_rules_about_urls_come_before_the_page_is_read(tmp_path: Path) -> None:
    (tmp_path / "domains.txt").write_text("bad.example\n")
    urls = UrlsConfig(domains=(str(tmp_path / "domains.txt"),))
    unreadable = http(b"\x00" * 10, "Content-Encoding: gzip")
    items = of(
        tmp_path,
        record("response", unreadable, "https://www.bad.example/a"),
        record("response", unreadable, f"{SITE}/photo.JPG?size=2"),
        record("response", http(page("kept")), f"<{SITE}/a>"),
        urls=urls,
    )
    assert skips(items) == ["domain", "file type"]
    assert [item.url for item in items if isinstance(item, RawText)] == [f"{SITE}/a"]


def chunked(body: bytes, size: int = 7) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: x\r\n\r\n"


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("headers", "encode"),
    [
        (["Content-Encoding: gzip"], gzip.compress),
        (["Content-Encoding: X-GZIP"], gzip.compress),
        (["Content-Encoding: deflate"], zlib.compress),
        (["Content-Encoding: deflate"], raw_deflate),
        (["Content-Encoding: br"], brotli.compress),
        (["Content-Encoding: zstd"], zstandard.compress),
        (["Content-Encoding: gzip, br"], lambda body: brotli.compress(gzip.compress(body))),
        (["Content-Encoding: gzip", "Content-Encoding: br"], lambda body: brotli.compress(gzip.compress(body))),
        (["Transfer-Encoding: chunked"], chunked),
        (["Transfer-Encoding: gzip, chunked"], lambda body: chunked(gzip.compress(body))),
        (["Content-Encoding: gzip", "Transfer-Encoding: chunked"], lambda body: chunked(gzip.compress(body))),
        (["Content-Encoding: utf-8"], bytes),
        (["Content-Encoding: gzip"], bytes),  # the crawler has decoded the body and kept the header
        (["Content-Encoding: br"], bytes),
        (["Content-Encoding: zstd", "Transfer-Encoding: chunked"], bytes),
    ],
)
def test_encodings_are_undone(tmp_path: Path, headers: list[str], encode) -> None:
    body = page("It was the best of times. " * 20)
    (item,) = of(tmp_path, response("a", encode(body), *headers))
    assert item.text == ("It was the best of times. " * 20).strip()


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("Content-Encoding: gzip", gzip.compress(page("cut off") * 9, mtime=0)[:-20]),
        ("Content-Encoding: br", brotli.compress(bytes(range(256)) * 9)[:-20]),
        ("Content-Encoding: zstd", zstandard.compress(page("cut off") * 9)[:-5]),
        ("Content-Encoding: deflate", zlib.compress(page("cut off") * 9)[:-5]),
        ("Content-Encoding: gzip", b"\x00\x01 neither gzip nor text"),
        ("Content-Encoding: compress", b"\x1f\x9d"),
        ("Transfer-Encoding: chunked", chunked(page("cut off"))[:-40]),
        ("Transfer-Encoding: chunked", b"3\r\nabc\r\nno size\r\n"),
    ],
)
def test_body_that_cannot_be_decoded_is_a_reject_that_names_the_page(tmp_path: Path, header: str, body: bytes) -> None:
    reject, kept = of(tmp_path, response("a", body, header), response("b", page("kept")))
    assert (reject.place, reject.rule) == ("byte 0", "HTTP encoding")
    assert reject.reason.startswith(f"{SITE}/a cannot be decoded: ")
    assert texts([kept]) == ["kept"]


def test_response_without_status_is_a_reject(tmp_path: Path) -> None:
    items = of(tmp_path, record("response", b"no http at all", f"{SITE}/a"), response("b", page("kept")))
    assert rejects(items) == [("byte 0", "no HTTP header")]
    assert texts(items) == ["kept"]


@pytest.mark.parametrize(
    ("in_header", "in_page", "charset", "note"),
    [
        ("utf-8", "", "utf-8", ""),
        ("windows-1251", "", "windows-1251", ""),
        ("", "windows-1251", "windows-1251", ""),
        ("'KOI8-R'", "", "koi8-r", ""),
        ("windows-1251", "utf-8", "utf-8", "charset"),  # only UTF-8 fits
        ("utf-8", "windows-1251", "windows-1251", "charset"),
        ("iso-8859-1", "windows-1251", "windows-1251", "charset"),  # both fit; the bytes look like the second
        ("windows-1251", "iso-8859-1", "windows-1251", ""),
        ("iso-8859-1", "shift_jis", "shift_jis", "charset"),
        ("no-such-charset", "no-such-charset", "koi8-r", "charset"),
        ("utf-16", "", "utf-8", "charset"),
        ("utf-8", "utf-16", "utf-8", ""),
        ("x-mac-cyrillic", "", "mac-cyrillic", ""),
        ("", "iso-8859-5", "iso-8859-5", ""),
    ],
)
def test_charset_that_fits_is_used(tmp_path: Path, in_header: str, in_page: str, charset: str, note: str) -> None:
    text = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" if charset == "shift_jis" else RUSSIAN
    body = f"<html><head><meta charset='{in_page}'></head><body><p>{text}</p></body></html>".encode(charset)
    kind = f"text/html; charset={in_header}" if in_header else "text/html"
    (item,) = of(tmp_path, response("a", body, kind=kind))
    assert (item.text, item.note) == (text, note)


def test_page_of_no_charset_is_rejected(tmp_path: Path) -> None:
    binary = b"<p>" + bytes(range(0x80, 0xA0)) * 50 + b"\xff\xfe\xfd" * 500
    items = of(tmp_path, response("a", binary), response("b", binary, kind="text/plain"), response("c", page("kept")))
    assert [rule for _, rule in rejects(items)] == ["charset", "charset"]
    assert texts(items) == ["kept"]


def test_page_that_is_too_long_is_a_reject_and_other_long_records_are_not(tmp_path: Path) -> None:
    bomb = gzip.compress(b"<p>" + b"x" * 2_000_000)
    items = of(
        tmp_path,
        response("a", b"<p>" + b"x" * 1_000_000),
        response("b", bomb, "Content-Encoding: gzip"),
        response("c", brotli.compress(b"x" * 2_000_000), "Content-Encoding: br"),
        response("video", b"\x00" * 1_000_001, kind="video/mp4"),
        response("d", b"y" * 999_000, kind="text/plain"),
        max_bytes=1_000_000,
    )
    assert [rule for _, rule in rejects(items)] == ["too long"] * 3
    assert skips(items) == ["not HTML or text"]
    assert [len(text) for text in texts(items)] == [999_000]


def test_page_of_html_has_a_limit_of_its_own(tmp_path: Path) -> None:
    (reject,) = of(tmp_path, response("a", b"<p>" + b"x" * MAX_PAGE_BYTES))
    assert reject.reason == "the page is longer than 16 MB (the limit of web pages)"


def test_nuls_and_surrogates_do_no_harm(tmp_path: Path) -> None:
    items = of(
        tmp_path,
        response("a", b"<p>a &#xD800; b &#0; c \0 d</p>"),
        response("b", b"+2AA-", kind="text/plain; charset=utf-7"),
        record("response", http(page("kept")), "http://caf\u00e9.example/\ud7ff"),
    )
    assert len(texts(items)) == 3
    for item in items:
        item.text.encode()
        item.url.encode()


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_archive_without_records_is_blank(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, gzip.compress(b"") if name.endswith(".gz") else b"")) == [Skip("blank")]
