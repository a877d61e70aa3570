"""A text file is one document."""

import gzip
from pathlib import Path

from crosscut.corpus.readers import RawText, Skip
from tests.corpus.reads import read, rejects


def write(folder: Path, data: bytes, name: str = "a.txt") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def test_file_is_a_document_as_it_stands(tmp_path: Path) -> None:
    data = "\ufeffA book.\r\n\r\nIts \0 second paragraph, naïve.\n".encode()
    assert read(write(tmp_path, data)) == [RawText("A book.\r\n\r\nIts \0 second paragraph, naïve.\n", 1, len(data))]


def test_packed_file_is_unpacked(tmp_path: Path) -> None:
    (item,) = read(write(tmp_path, gzip.compress(b"text"), "a.txt.gz"))
    assert isinstance(item, RawText) and item.text == "text"


def test_byte_order_mark_declares_the_charset(tmp_path: Path) -> None:
    for codec in ("utf-16", "utf-32", "utf-8-sig"):
        (item,) = read(write(tmp_path, "naïve “中文”".encode(codec)))
        assert isinstance(item, RawText) and item.text == "naïve “中文”"
    (reject,) = read(write(tmp_path, "naïve".encode("utf-16") + b"x"))
    assert (reject.place, reject.rule) == ("byte 12", "not UTF-16")


def test_file_that_is_no_utf8_is_rejected_with_the_byte(tmp_path: Path) -> None:
    (reject,) = read(write(tmp_path, b"A caf\xe9 in Paris"))
    assert (reject.place, reject.rule) == ("byte 5", "not UTF-8")
    assert "in Paris" in reject.excerpt


def test_blank_file_is_passed_over(tmp_path: Path) -> None:
    assert read(write(tmp_path, b"")) == [Skip("blank", 1)]
    assert read(write(tmp_path, b" \n")) == [Skip("blank", 1)]


def test_file_that_is_too_long_is_rejected(tmp_path: Path) -> None:
    assert rejects(read(write(tmp_path, b"x" * 1001), max_bytes=1000)) == [("byte 0", "too long")]
    assert rejects(read(write(tmp_path, b"x" * 1000), max_bytes=1000)) == []


def test_truncated_file_is_no_document(tmp_path: Path) -> None:
    packed = gzip.compress(bytes(range(32, 127)) * 1000)
    path = write(tmp_path, packed[:-20], "a.txt.gz")
    assert rejects(read(path)) == [(f"byte {len(packed) - 20}", "damaged file")]
