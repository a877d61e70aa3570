"""Decode HTTP responses: undo the transfer encodings and the content encodings.

Crawlers differ in what they store. Some store the bytes as they were sent, and others decode them first but keep the
header that names the encoding. If the header names an encoding but the body is plain text, the body is therefore used
as it is.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import brotli
import zstandard

from crosscut.corpus.readers.archives.headers import BLANK_LINE, media_type, split_head
from crosscut.corpus.readers.selection import is_binary
from crosscut.data.text.sources import PACKED_BYTES

_STATUS = re.compile(r"HTTP/\d(?:\.\d)?\s+(\d{3})(?!\S)", re.IGNORECASE)
_CHUNK = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\n]*)?\r?\n")
_OUTPUT_BYTES = 1 << 20
"""Number of bytes that are unpacked at a time."""

_ZSTD_WINDOW = 8 << 20
"""Largest zstd window that HTTP allows (RFC 9659), in bytes."""


class EncodingError(Exception):
    """Error for a body that cannot be decoded. The error's text is the reason."""


class BodyTooLongError(Exception):
    """Error for a body that is longer than allowed after decoding."""


class Response(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    """Values of the header lines, by name in lower case."""

    body: bytes
    """Body before any encoding is undone."""

    @property
    def media_type(self) -> tuple[str, str]:
        """Media type and charset from the header. Both may be empty."""
        return media_type(self.headers.get("content-type", ""))


def parse_response(content: bytes) -> Response | None:
    """Parse the content of a record. Return None if the content does not begin like an HTTP response."""
    end = BLANK_LINE.search(content)
    first, headers = split_head(content[: end.start()] if end else content)
    status = _STATUS.match(first)
    return Response(int(status[1]), headers, content[end.end() :] if end else b"") if status else None


def decode_body(response: Response, max_bytes: int) -> bytes:
    """Undo the encodings of a body.

    Raises `EncodingError` if the body cannot be decoded or ends too early, and `BodyTooLongError` if the result has
    more than `max_bytes` bytes. Memory stays within a few megabytes of this limit.
    """
    body = response.body
    applied = [*_names(response, "content-encoding"), *_names(response, "transfer-encoding")]
    for name in reversed(applied):
        if name == "chunked":
            body = _join_chunks(body)
        elif name in _DECODERS:
            body = _decoded(name, body, max_bytes)
        elif name in _UNSUPPORTED:
            raise EncodingError(f"the encoding `{name}` is not supported")
    if len(body) > max_bytes:
        raise BodyTooLongError
    return body


def _names(response: Response, header: str) -> list[str]:
    return [name.strip().lower() for name in response.headers.get(header, "").split(",")]


def _join_chunks(body: bytes) -> bytes:
    if not _CHUNK.match(body):
        return body  # the crawler has joined the chunks
    parts: list[bytes] = []
    place = 0
    while chunk := _CHUNK.match(body, place):
        size = int(chunk[1], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[chunk.end() : chunk.end() + size])
        place = chunk.end() + size
        place += 2 if body.startswith(b"\r\n", place) else body.startswith(b"\n", place)
    what = "ends before the last chunk" if place >= len(body) else f"has no chunk at byte {place} of the body"
    raise EncodingError(f"the chunked transfer {what}")


def _decoded(name: str, body: bytes, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        for part in _DECODERS[name](body):
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise BodyTooLongError
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as error:
        if not size and not is_binary(body):
            return body  # the crawler has decoded the body
        raise EncodingError(f"the `{name}` data of the body cannot be decoded: {error}") from None
    return b"".join(parts)


def _inflate(body: bytes, wbits: int) -> Iterator[bytes]:
    decompressor = zlib.decompressobj(wbits)
    while body and not decompressor.eof:
        yield decompressor.decompress(body, _OUTPUT_BYTES)
        body = decompressor.unconsumed_tail
    yield decompressor.flush()
    if not decompressor.eof:
        raise EOFError("the data ends too early")


def _gzip(body: bytes) -> Iterator[bytes]:
    return _inflate(body, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes) -> Iterator[bytes]:
    """Decompress zlib data, or the data without a zlib header that some servers send."""
    has_header = len(body) > 1 and body[0] & 15 == zlib.DEFLATED and (body[0] << 8 | body[1]) % 31 == 0
    return _inflate(body, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _brotli(body: bytes) -> Iterator[bytes]:
    decompressor = brotli.Decompressor()
    yield decompressor.process(body, output_buffer_limit=_OUTPUT_BYTES)
    while not decompressor.is_finished():
        if decompressor.can_accept_more_data():
            raise EOFError("the data ends too early")
        yield decompressor.process(b"", output_buffer_limit=_OUTPUT_BYTES)


def _zstd(body: bytes) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
    for start in range(0, len(body), PACKED_BYTES):
        yield decompressor.decompress(body[start : start + PACKED_BYTES])
        if decompressor.eof:
            return
    raise EOFError("the data ends too early")


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
_UNSUPPORTED = frozenset({"compress", "x-compress", "dcb", "dcz", "exi"})
"""Encodings that exist but are not decoded. Any other unknown name, such as `utf-8` or `none`, is a server's mistake
and is ignored."""
