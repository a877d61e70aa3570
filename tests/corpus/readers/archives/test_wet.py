"""Texts of a crawl become documents."""

from pathlib import Path

from crosscut.corpus.readers import RawText
from tests.corpus.readers.archives.crawls import SITE, pack, page, record, response, write
from tests.corpus.reads import read, rejects, skips


def conversion(name: str, text: bytes, **headers: str) -> bytes:
    return record("conversion", text, f"{SITE}/{name}", Content_Type="text/plain", **headers)


def test_conversions_are_documents_and_all_else_is_counted(tmp_path: Path) -> None:
    records = [
        record("warcinfo", b"Software-Info: a crawler\r\n"),
        conversion("a", "Ein Text über Äpfel\nzwei Zeilen\n".encode(), WARC_Identified_Content_Language="deu"),
        conversion("b", b" \n"),
        conversion("c", "café".encode("latin-1") * 99),
        conversion("photo.jpg", b"a caption"),
        conversion("d", b"cut", WARC_Truncated="length"),
        conversion("e", bytes(range(0x80, 0xA0)) * 50 + b"\xff\xfe\xfd" * 500),
        conversion("f", b"x" * 20_000),
        response("g", page("a page")),
    ]
    path = write(tmp_path / "CC-MAIN-20261126000000-00000.warc.wet.gz", pack(records))
    items = read(path, max_bytes=10_000)
    first, second = (item for item in items if isinstance(item, RawText))
    assert first.text == "Ein Text über Äpfel\nzwei Zeilen\n"
    assert (first.url, first.record) == (f"{SITE}/a", len(pack(records[:1])))
    assert second.text == "café" * 99
    assert skips(items) == ["warcinfo record", "blank", "file type", "truncated record", "response record"]
    assert [rule for _, rule in rejects(items)] == ["charset", "too long"]
