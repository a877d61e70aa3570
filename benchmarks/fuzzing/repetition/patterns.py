"""Files that repeat one piece of a format, such as a tag that is never closed, until they have a given size.

A reader whose time or memory grows with the square of a record shows it here, because the files are large. The pieces
are all tags, all marks of the markup and all fields of a head that the readers know, alone, in text, and inside deep
nesting.
"""

import bz2
import gzip
import io
import json
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

SIZES = (64_000, 1_000_000, 16_000_000)
"""Sizes of the files in bytes, before they are compressed."""


PREPARE, TOKENIZE = "prepare", "data.text"
"""In place of a reader: texts that pass all stages of a corpus, or that `data.text` of a training run names."""


class Pattern(NamedTuple):
    """A file of any size."""

    reader: str
    """Format of the file, `PREPARE` or `TOKENIZE`."""

    name: str
    suffix: str
    """End of the file's name."""

    build: Callable[[int], bytes]
    """Function that returns a file of about as many bytes. If the file is compressed, its content has the size."""


_TABLES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "pieces.toml").read_text(encoding="utf-8"))


def _pieces(table: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, start, piece and end of each pattern in a table of `pieces.toml`."""
    for name, value in _TABLES[table].items():
        start, piece, end = ("", value, "") if isinstance(value, str) else value
        yield name, start, piece, end


def repeat(start: str, piece: str, end: str, size: int) -> bytes:
    """Bytes of about `size`: the start, the piece as often as it fits, and the end."""
    head, unit, tail = (text.encode() for text in (start, piece, end))
    return head + unit * max(1, (size - len(head) - len(tail)) // len(unit)) + tail


def _line(start: str, piece: str, end: str, size: int) -> bytes:
    text = repeat(start, piece, end, size).decode()
    return json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"


def patterns() -> Iterator[Pattern]:
    """All patterns, reader by reader."""
    yield from _pages()
    yield from _mails()
    yield from _dumps()
    yield from _archives()
    yield from _plain_formats()
    for name, *pieces in _pieces("documents"):
        yield Pattern(PREPARE, name, ".txt", partial(repeat, *pieces))
        yield Pattern(TOKENIZE, name, ".jsonl", partial(_line, *pieces))


def _page(start: str, piece: str, size: int) -> bytes:
    return repeat(f"<html><body><h1>Title</h1>{start}", piece, "", size)


def _pages() -> Iterator[Pattern]:
    for tag in _TABLES["tags"].split():
        yield Pattern("html", f"open <{tag}>", ".html", partial(_page, "", f"<{tag}>"))
        yield Pattern("html", f"<{tag}> with text", ".html", partial(_page, "", f"<{tag}>a</{tag}>\n"))
        yield Pattern("html", f"ends of <{tag}>", ".html", partial(_page, "", f"</{tag}>"))
    for name, start, piece, _ in _pieces("html"):
        yield Pattern("html", name, ".html", partial(_page, start, piece))
    for tag in _TABLES["nested"].split():
        for name, _, piece, _ in _pieces("html_inside"):
            start = f"<{tag}><li>" * 990 if tag in ("ol", "ul") else f"<{tag}>" * 990
            yield Pattern("html", f"{name} in 990 <{tag}>", ".html", partial(_page, start, piece))


def _mails() -> Iterator[Pattern]:
    for name, start, piece, end in _pieces("mail_heads"):
        head, tail = f"From: a@b.example\n{start}", f"{end}\n\nSome text.\n"
        yield Pattern("mail", f"{name} in a head", ".eml", partial(repeat, head, piece, tail))
    for name, head, piece, _ in _pieces("mail_bodies"):
        yield Pattern("mail", name, ".eml", partial(repeat, f"Subject: a\n{head}\n", piece, ""))
    for levels in (20, 90, 200):
        start = "".join(f"Content-Type: multipart/mixed; boundary=x{level}\n\n--x{level}\n" for level in range(levels))
        for name, piece in (("lines", "some text\n"), ("dashes", "--x\n")):
            yield Pattern("mail", f"{name} in {levels} parts", ".eml", partial(repeat, f"{start}\n", piece, ""))
    start = "From a@b Sat Nov 21 22:44:22 2026\n"
    box = {
        "messages": ("", f"{start}Subject: a\n\ntext\n\n"),
        "starts": (start, "\n\nFrom "),
        "empty": ("", f"{start}\n"),
    }
    for name, (first, piece) in box.items():
        yield Pattern("mail", f"{name} of a box", ".mbox", partial(repeat, first, piece, ""))


_DUMP = "<mediawiki xml:lang='en'><siteinfo><sitename>W</sitename></siteinfo>"
_PAGE = "<page><title>T</title><ns>0</ns><id>1</id><revision><text>"
_PAGE_END = "</text></revision></page>\n"


def _article(start: str, piece: str, end: str, size: int) -> bytes:
    escaped = (text.replace("&", "&amp;").replace("<", "&lt;") for text in (start, piece, end))
    first, unit, last = escaped
    return repeat(f"{_DUMP}{_PAGE}Some text. {first}", unit, f"{last}{_PAGE_END}</mediawiki>", size)


def _dumps() -> Iterator[Pattern]:
    for name, *parts in _pieces("wikitext"):
        yield Pattern("wikipedia", name, ".xml", partial(_article, *parts))
    pieces = {
        "pages": f"{_PAGE}a{_PAGE_END}", "open pages": "<page>", "XML elements": "<x>", "XML entities": "&amp;",
        "XML comments": "<!-- a -->", "broken pages": "<page></x>", "redirects": "<page><redirect/></page>",
        "namespaces": "<namespace key='1'>a</namespace>",
    }  # fmt: skip
    for name, piece in pieces.items():
        yield Pattern("wikipedia", name, ".xml", partial(repeat, _DUMP, piece, ""))
    yield Pattern("wikipedia", "XML attributes", ".xml", partial(repeat, f"{_DUMP}<page ", "a='b' ", ""))
    yield Pattern("wikipedia", "long title", ".xml", partial(repeat, f"{_DUMP}<page><title>", "a", "</title></page>"))


def record(kind: str, content: bytes, *, number: int = 0, head: bytes = b"") -> bytes:
    """One record of a web archive."""
    fields = (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: https://a.example/{number}\r\n"
              f"Content-Type: application/http\r\nContent-Length: {len(content)}\r\n").encode()  # fmt: skip
    return fields + head + b"\r\n" + content + b"\r\n\r\n"


def _response(start: str, piece: str, end: str, size: int) -> bytes:
    return record("response", repeat(start, piece, end, size))


def _with_head(piece: str, size: int) -> bytes:
    return record("conversion", b"Some text.", head=repeat("X: ", piece, "\r\n", size))


def _records(content: bytes, size: int) -> bytes:
    one = record("response", content)
    return one * max(1, size // len(one))


def _archives() -> Iterator[Pattern]:
    status = "HTTP/1.1 200 OK\r\n"
    page = f"{status}Content-Type: text/html\r\n"
    for name, _, piece, _ in _pieces("http_heads"):
        yield Pattern("warc", f"{name} in HTTP", ".warc", partial(_response, status, piece, "\r\n\r\n<p>Some text."))
        yield Pattern("warc", f"{name} after HTTP", ".warc", partial(_response, status.strip(), piece, ""))
        yield Pattern("wet", f"{name} in a record", ".wet", partial(_with_head, piece))
    chunked = f"{page}Transfer-Encoding: chunked\r\n\r\n"
    for name, piece in (("chunks", "1\r\na\r\n"), ("extensions", "1;"), ("blanks before a chunk", " ")):
        yield Pattern("warc", name, ".warc", partial(_response, chunked, piece, "0\r\n\r\n"))
    encodings = f"{page}Content-Encoding: gzip"
    yield Pattern(
        "warc", "list of encodings", ".warc", partial(_response, encodings, ", gzip", "\r\n\r\n<p>Some text.")
    )
    yield Pattern("warc", "nested lists", ".warc", partial(_response, f"{page}\r\n{'<ol><li>' * 990}", "<li>a", ""))
    yield Pattern("warc", "paragraphs", ".warc", partial(_response, f"{page}\r\n", "<p>Some text.</p>", ""))
    small = f"{page}\r\n<p>Some text.".encode()
    yield Pattern("warc", "records", ".warc", partial(_records, small))
    yield Pattern("warc", "empty records", ".warc", partial(_records, b""))
    yield Pattern("warc", "packed records", ".warc.gz",
                  lambda size: gzip.compress(record("response", small)) * max(1, size // 230))  # fmt: skip
    for name, piece in (("versions", "WARC/1.0\r\n"), ("line ends", "\r\n"), ("returns", "\r"), ("NUL", "\0"),
                        ("letters", "a"), ("open versions", "WARC/1.0"),
                        ("broken heads", "WARC/1.0\r\nA: b\r\n\r\n")):  # fmt: skip
        yield Pattern("warc", f"{name} without a record", ".warc", partial(repeat, "", piece, ""))
    yield Pattern("warc", "starts of members", ".warc.gz", partial(_members, b"\x1f\x8b\x08"))
    yield Pattern("warc", "empty members", ".warc.gz", partial(_members, gzip.compress(b"", mtime=0)))
    yield Pattern("warc", "empty frames", ".warc.zst", partial(_members, zstandard.compress(b"")))
    yield Pattern("warc", "starts of frames", ".warc.zst", partial(_members, b"\x28\xb5\x2f\xfd"))
    for name, _, piece, _ in _pieces("text"):
        yield Pattern("wet", name, ".wet", partial(_text_record, piece))
    yield Pattern("wet", "records", ".wet", partial(_members, record("conversion", b"a")))


def _text_record(piece: str, size: int) -> bytes:
    return record("conversion", repeat("a", piece, "", size))


def _members(member: bytes, size: int) -> bytes:
    return member * max(1, size // len(member))


def _plain_formats() -> Iterator[Pattern]:
    for name, *pieces in _pieces("jsonl"):
        yield Pattern("jsonl", name, ".jsonl", partial(repeat, *pieces))
    for suffix, pack in (
        (".gz", partial(gzip.compress, mtime=0)),
        (".bz2", bz2.compress),
        (".zst", zstandard.compress),
    ):
        yield Pattern("jsonl", f"members of {suffix}", f".jsonl{suffix}", partial(_members, pack(b"{}\n")))
        yield Pattern("jsonl", f"empty members of {suffix}", f".jsonl{suffix}", partial(_members, pack(b"")))
        yield Pattern("text", f"letters in {suffix}", f".txt{suffix}", lambda size, pack=pack: pack(b"a" * size))
    for name, _, piece, _ in _pieces("text"):
        yield Pattern("text", name, ".txt", partial(repeat, "a", piece, ""))
    yield Pattern("parquet", "rows", ".parquet", lambda size: _table(["a"] * (size // 8)))
    yield Pattern("parquet", "different rows", ".parquet", lambda size: _table([f"{i:08x}" for i in range(size // 8)]))
    yield Pattern("parquet", "long rows", ".parquet", lambda size: _table(["a" * (size // 4)] * 4))
    yield Pattern("parquet", "empty rows", ".parquet", lambda size: _table([None] * (size // 8)))
    yield Pattern("parquet", "columns", ".parquet", lambda size: _table(["a"], size // 400))


def _table(texts: list[str | None], num_columns: int = 0) -> bytes:
    """Table of texts, with more columns of one letter."""
    more = {str(number): ["b"] * len(texts) for number in range(num_columns)}
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), **more}), sink)
    return sink.getvalue()
