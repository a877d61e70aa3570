"""Steps that the readers of WARC and WET files share: the loop over the records, the URL rules, and the decoding of
texts.
"""

from collections.abc import Callable, Iterator
from functools import partial

from crosscut.corpus.filters.urls import UrlFilter
from crosscut.corpus.readers.archives.records import ArchiveRecord, read_records
from crosscut.corpus.readers.charsets import decode
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, Skip, unless_blank, within_budget
from crosscut.data.text.records import Reject, excerpt

ReadRecord = Callable[[ArchiveRecord, ReaderSettings, UrlFilter], Item]

KINDS = ("warcinfo", "response", "request", "metadata", "revisit", "resource", "conversion", "continuation")
"""Types of records that the format defines."""


def read_archive(file: File, reading: ReaderSettings, read_record: ReadRecord) -> Iterator[Item]:
    """Yield the result of `read_record` for each record, and a reject for each part of the file that cannot be read.

    An empty file is skipped as `blank`. Raises `DataError` if a list of the URL rules cannot be read.
    """
    urls = UrlFilter(reading.urls)
    item: Item | None = None
    for record in read_records(file, reading.max_bytes):
        if isinstance(record, Reject):
            item = record
        else:
            read = partial(read_record, record, reading, urls)
            item = within_budget(file.watch, record.place, record.content, read)
        yield (
            item._replace(record=record.number)
            if isinstance(item, Skip) and isinstance(record, ArchiveRecord)
            else item
        )
    if item is None:
        yield Skip("blank")


def other_kind(record: ArchiveRecord) -> Skip:
    """Make the `Skip` for a record whose type the reader of this format does not use. The report counts each type."""
    return Skip(f"{record.kind if record.kind in KINDS else 'unknown'} record")


def url_of(record: ArchiveRecord) -> str:
    """URL of the page in a record. Some crawlers put it in angle brackets."""
    return record.headers.get("warc-target-uri", "").strip().removeprefix("<").removesuffix(">")


def find_reason(record: ArchiveRecord, urls: UrlFilter) -> Skip | None:
    """Make the `Skip` for a record that the crawler did not store completely, or whose URL breaks a rule. Returns None
    for any other record.
    """
    if "warc-truncated" in record.headers:
        return Skip("truncated record")
    if "warc-segment-number" in record.headers:
        return Skip("segmented record")
    broken = urls.find_rule(url_of(record))
    return Skip(broken[0]) if broken else None


def read_text(record: ArchiveRecord, data: bytes, charset: str) -> Item:
    """Make a document from plain text. `charset` is the declared charset, which may be empty."""
    decoded = decode(data, charset)
    if decoded is None:
        reason = f"no charset fits the bytes of {excerpt(url_of(record))}"
        return Reject(record.place, "charset", reason, excerpt(data))
    url, note = url_of(record), "charset" if decoded.is_other else ""
    document = RawText(decoded.text, record.number, record.position, url=url, note=note)
    return unless_blank(document._replace(num_replaced=decoded.num_replaced))
