"""Items that readers yield: documents (`RawText`), unreadable records (`Reject`) and records to ignore (`Skip`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from crosscut.config.corpora import CorpusConfig, Extraction, SourceConfig, UrlsConfig
from crosscut.corpus.execution.budget import RecordWatch
from crosscut.corpus.readers.files import File
from crosscut.data.text.records import RecordFile, Reject, excerpt


class RawText(NamedTuple):
    """A document as it was read from a file."""

    text: str

    record: int
    """Number of the line, row, message or page in the file, from 1, or offset of the record of a web archive."""

    position: int = 0
    """Number of bytes read from the disk up to this document."""

    url: str = ""
    karma: float | None = None
    title: str = ""

    note: str = ""
    """Names of the workarounds that were needed to read the document, separated by commas, such as `charset` if the
    declared charset did not fit. Empty if none was needed."""

    num_replaced: int = 0
    """Number of places in the file's text that its charset cannot decode. U+FFFD stands there."""


class Skip(NamedTuple):
    """A record that is not meant to become a document, such as a redirect."""

    rule: str
    """Kind of record, such as `redirect`. The report counts skipped records by kind."""

    record: int = 0
    """Number of the line, row, message or page in the file, from 1, or offset of the record of a web archive. 0 if
    unknown."""


Item = RawText | Reject | Skip


def unless_blank(document: RawText) -> RawText | Skip:
    """Return the document, or a `Skip` if its text is blank."""
    has_text = document.text and not document.text.isspace()
    return document if has_text else Skip("blank", document.record)


@dataclass(frozen=True, kw_only=True)
class ReaderSettings:
    """Settings for reading the files of a source."""

    text_key: str = "text"
    url_key: str = "url"
    karma_key: str = "karma"
    title_key: str = "title"

    max_bytes: int = 64 * 10**6
    """Maximum size of a document in bytes. A longer line, file or message is rejected."""

    extraction: Extraction = Extraction.FAST
    """Method of finding the main text of a page. Only the html and warc readers need it."""

    tokenizer: str = ""
    """Path of a `tokenizer.json`. Only the megatron reader needs a tokenizer."""

    urls: UrlsConfig = field(default_factory=UrlsConfig)
    """Rules about the URLs of documents. Only the readers of web archives apply the rules, because they would otherwise
    parse pages that a later stage drops."""

    @classmethod
    def of(cls, config: CorpusConfig, source: SourceConfig) -> "ReaderSettings":
        """Create the settings for one source from the config of a corpus."""
        return cls(
            text_key=source.text_key,
            url_key=source.url_key,
            karma_key=source.karma_key,
            title_key=source.title_key,
            max_bytes=config.ingest.max_document_mb * 10**6,
            extraction=config.html.extraction,
            tokenizer=config.tokens.tokenizer,
            urls=config.urls,
        )

    def of_records(self, file: File) -> RecordFile:
        """Describe a file of records, for the readers of `data.text`. They repair records and collect rejects."""
        return RecordFile(
            name=file.url,
            size=file.size,
            compression=file.compression,
            text_key=self.text_key,
            other_keys=(self.url_key, self.karma_key, self.title_key),
            max_bytes=self.max_bytes,
            is_strict=False,
        )


def within_budget(
    watch: RecordWatch, place: str, data: bytes | str, read: Callable[[], Item], *, size: int | None = None
) -> Item:
    """Read a record within its budget of processor time and memory, and return the result of `read`.

    `data` is the record, or its beginning if `size` has the number of bytes. A record that has exceeded its budget in
    an earlier attempt is not read. The result is then a reject.
    """
    loss = watch.begin(place, len(data) if size is None else size)
    if loss:
        return Reject(place, loss.rule, loss.reason, excerpt(data))
    item = read()
    watch.end()
    return item
