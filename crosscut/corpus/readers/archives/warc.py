"""Read WARC files: the responses that a crawl has received. Each response with an HTML page or a text is a document.

All other records are counted by kind. The rules about URLs apply before a page is parsed, because most of the time goes
into the search for the main text.
"""

from collections.abc import Iterator

from crosscut.corpus.filters.urls import UrlFilter
from crosscut.corpus.readers.archives.headers import media_type
from crosscut.corpus.readers.archives.reading import find_reason, other_kind, read_archive, read_text, url_of
from crosscut.corpus.readers.archives.records import ArchiveRecord
from crosscut.corpus.readers.archives.responses import (
    BodyTooLongError,
    EncodingError,
    Response,
    decode_body,
    parse_response,
)
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.html import read_page
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, Skip
from crosscut.corpus.readers.selection import START_BYTES, is_html
from crosscut.data.text.records import Reject, excerpt, too_long

HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPE = "text/plain"
STATUS_OK = 200


def read_warc(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the documents of a WARC file, in order."""
    yield from read_archive(file, reading, _read_record)


def _read_record(record: ArchiveRecord, reading: ReaderSettings, urls: UrlFilter) -> Item:
    if record.kind != "response":
        return other_kind(record)
    kind, _ = media_type(record.headers.get("content-type", ""))
    if kind == "text/dns" or url_of(record).startswith("dns:"):
        return Skip("dns record")
    if skipped := find_reason(record, urls):
        return skipped
    response = parse_response(record.content)
    if response is None and kind != "application/http":
        return Skip("not HTTP")  # for example a file from an FTP server
    if response is None:
        reason = f"the response of {excerpt(url_of(record))} does not begin with an HTTP status"
        return Reject(record.place, "no HTTP header", reason, excerpt(record.content))
    if response.status != STATUS_OK:
        return Skip("status not 200")
    return _read_response(record, response, reading)


def _read_response(record: ArchiveRecord, response: Response, reading: ReaderSettings) -> Item:
    kind, charset = response.media_type
    kind = kind or media_type(record.headers.get("warc-identified-payload-type", ""))[0]
    if kind and kind not in (*HTML_TYPES, TEXT_TYPE):
        return Skip("not HTML or text")
    if record.length > reading.max_bytes:
        return too_long(record.place, "the record", record.content, reading.max_bytes)
    try:
        data = decode_body(response, reading.max_bytes)
    except BodyTooLongError:
        return too_long(record.place, "the decoded page", record.content, reading.max_bytes)
    except EncodingError as error:
        reason = f"{excerpt(url_of(record))} cannot be decoded: {error}"
        return Reject(record.place, "HTTP encoding", reason, excerpt(response.body))
    if not kind and not is_html(data[:START_BYTES]):
        return Skip("not HTML or text")
    return read_text(record, data, charset) if kind == TEXT_TYPE else _read_html(record, data, charset, reading)


def _read_html(record: ArchiveRecord, data: bytes, charset: str, reading: ReaderSettings) -> Item:
    page = read_page(data, reading.extraction, place=record.place, charset=charset)
    if isinstance(page, Reject | Skip):
        return page
    document = RawText(page.text, record.number, record.position, url=url_of(record), title=page.title)
    return document._replace(note=page.note, num_replaced=page.num_replaced)
