"""Archives as crawls publish them, written with FastWARC's writer, and damaged in known places."""

import gzip
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastwarc.stream_io import ZstdWriter
from fastwarc.warc import WarcRecord, WarcRecordType

SITE = "https://www.example.org"


def record(kind: str, content: bytes, url: str = "", **headers: str) -> bytes:
    """One record. The underscores of further headers stand for dashes."""
    made = WarcRecord()
    made.init_headers(getattr(WarcRecordType, kind))
    if url:
        made.headers["WARC-Target-URI"] = url
    if kind in ("request", "response", "revisit"):
        made.headers["Content-Type"] = f"application/http; msgtype={kind}"
    for name, value in headers.items():
        made.headers[name.replace("_", "-")] = value
    made.set_bytes_content(content)
    written = io.BytesIO()
    made.write(written, checksum_data=True)
    return written.getvalue()


def http(body: bytes, *headers: str, status: str = "200 OK", kind: str = "text/html") -> bytes:
    """HTTP response."""
    lines = [f"HTTP/1.1 {status}", *([f"Content-Type: {kind}"] if kind else []), *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def page(text: str, title: str = "A page") -> bytes:
    return f"<!DOCTYPE html><html><head><title>{title}</title></head><body><p>{text}</p></body></html>".encode()


def response(name: str, body: bytes, *headers: str, status: str = "200 OK", kind: str = "text/html") -> bytes:
    return record("response", http(body, *headers, status=status, kind=kind), f"{SITE}/{name}")


def crawl(pages: Iterable[tuple[str, bytes]]) -> list[bytes]:
    """Records of a WARC file in the layout of a large crawl: for each page a request, a response and metadata."""
    records = [
        record("warcinfo", b"isPartOf: CC-MAIN-2026-47\r\npublisher: a crawl\r\nformat: WARC File Format 1.0\r\n\r\n")
    ]
    for name, body in pages:
        records += [
            record("request", f"GET /{name} HTTP/1.1\r\nHost: www.example.org\r\n\r\n".encode(), f"{SITE}/{name}"),
            response(name, body, f"X-Crawl-Content-Length: {len(body)}", "X-Crawl-Content-Encoding: gzip"),
            record("metadata", b"fetchTimeMs: 12\r\ncharset-detected: UTF-8\r\n\r\n", f"{SITE}/{name}"),
        ]
    return records


def pack(records: Sequence[bytes]) -> bytes:
    """Compress each record on its own."""
    return b"".join(gzip.compress(one, mtime=0) for one in records)


def pack_zstd(records: Sequence[bytes], dictionary: bytes) -> bytes:
    """Compress each record on its own, with a dictionary at the beginning of the file."""
    written = io.BytesIO()
    writer = ZstdWriter(written, dictionary=dictionary, compress_dictionary_frame=True)
    for one in records:
        writer.write(one)
        writer.finish()
    writer.close()
    return written.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
