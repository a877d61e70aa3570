"""Read WET files: the texts that a crawl has extracted from its pages. Each `conversion` record is a document."""

from collections.abc import Iterator

from crosscut.corpus.filters.urls import UrlFilter
from crosscut.corpus.readers.archives.headers import media_type
from crosscut.corpus.readers.archives.reading import find_reason, other_kind, read_archive, read_text
from crosscut.corpus.readers.archives.records import ArchiveRecord
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, ReaderSettings
from crosscut.data.text.records import too_long


def read_wet(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the documents of a WET file, in order."""
    yield from read_archive(file, reading, _read_record)


def _read_record(record: ArchiveRecord, reading: ReaderSettings, urls: UrlFilter) -> Item:
    if record.kind != "conversion":
        return other_kind(record)
    if skipped := find_reason(record, urls):
        return skipped
    if record.length > reading.max_bytes:
        return too_long(record.place, "the record", record.content, reading.max_bytes)
    return read_text(record, record.content, media_type(record.headers.get("content-type", ""))[1])
