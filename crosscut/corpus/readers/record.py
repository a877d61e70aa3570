"""Items that readers yield: documents (`Text`), unreadable records (`Reject`) and records to ignore (`Skip`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from crosscut.config.corpora import CorpusConfig, Extraction, SourceConfig, UrlsConfig
from crosscut.corpus.execution.budget import Watch

EXCERPT_CHARACTERS = 200


class Text(NamedTuple):
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


class Reject(NamedTuple):
    """A record that should be a document but cannot be read."""

    place: str
    """Position in the file, such as `line 17`, `row 3` or `byte 1024`."""

    rule: str
    """Kind of problem in a few fixed words, such as `not JSON`. The report counts rejects by kind."""

    reason: str
    """Details of the problem in this record."""

    excerpt: str = ""
    """First characters of the record, for the report."""

    lost: int = 0
    """Number of bytes on disk that are lost if more than one record is lost, for example after damage in a file. At
    least 1 if the number is unknown, and 0 if only this record is lost."""


class Skip(NamedTuple):
    """A record that is not meant to become a document, such as a redirect."""

    rule: str
    """Kind of record, such as `redirect`. The report counts skipped records by kind."""

    record: int = 0
    """Number of the line, row, message or page in the file, from 1, or offset of the record of a web archive. 0 if
    unknown."""


Item = Text | Reject | Skip


@dataclass(frozen=True, kw_only=True)
class Reading:
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
    def of(cls, config: CorpusConfig, source: SourceConfig) -> "Reading":
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


def within_budget(
    watch: Watch, place: str, data: bytes | str, read: Callable[[], Item], *, size: int | None = None
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


def excerpt(data: bytes | str) -> str:
    """Return the first characters of bytes or of a text. Characters that UTF-8 cannot encode are replaced."""
    if isinstance(data, str):
        return data[:EXCERPT_CHARACTERS].encode("utf-8", "replace").decode()
    return data[:EXCERPT_CHARACTERS].decode("utf-8", "replace")


def too_long(
    place: str, what: str, start: bytes | str, max_bytes: int, *, limit: str = "`ingest.max_document_mb`"
) -> Reject:
    """Make the reject for a record that is longer than `max_bytes`.

    `what` names the kind of record, such as `the line`. `start` is the beginning of the record. `limit` is the name of
    the limit in the message.
    """
    reason = f"{what} is longer than {max_bytes / 1e6:g} MB ({limit})"
    return Reject(place, "too long", reason, excerpt(start))
