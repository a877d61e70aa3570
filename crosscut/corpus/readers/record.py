"""What readers give: documents, what they could not read, and what they were not meant to."""

from dataclasses import dataclass
from typing import NamedTuple

from crosscut.config.corpus import CorpusConfig, SourceConfig

EXCERPT_CHARACTERS = 200


class Text(NamedTuple):
    """A document as it stands in a file."""

    text: str

    record: int
    """Its line, row, message or page in the file, from 1."""

    position: int = 0
    """Bytes on disk of the file that had been read by then; for progress."""

    url: str = ""
    karma: float | None = None
    title: str = ""

    note: str = ""
    """What had to be done to read it, such as `charset`; empty where nothing."""


class Reject(NamedTuple):
    """Something in a file that is no document but should be."""

    place: str
    """Where in the file: `line 17`, `row 3`, `byte 1024`."""

    rule: str
    """What is wrong, in words that are the same for all of a kind."""

    reason: str
    """What is wrong with this one."""

    excerpt: str = ""
    """Its first characters."""

    lost: int = 0
    """Bytes on disk that cannot be read for it, where it is more than one record: to the end of a damaged file."""


class Skip(NamedTuple):
    """Something in a file that is not meant to become a document, such as a redirect."""

    rule: str
    """What it is."""


Item = Text | Reject | Skip


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the files of a source are read."""

    text_key: str = "text"
    url_key: str = "url"
    karma_key: str = "karma"
    title_key: str = "title"

    max_bytes: int = 64 * 10**6
    """Longest document in bytes of UTF-8, and longest line, file or message that may hold one."""

    tokenizer: str = ""
    """A `tokenizer.json`; for megatron."""

    @classmethod
    def of(cls, config: CorpusConfig, source: SourceConfig) -> "Reading":
        """As a corpus has it for one of its sources."""
        return cls(
            text_key=source.text_key,
            url_key=source.url_key,
            karma_key=source.karma_key,
            title_key=source.title_key,
            max_bytes=config.ingest.max_document_mb * 10**6,
            tokenizer=config.tokens.tokenizer,
        )


def excerpt(data: bytes | str) -> str:
    """The first characters of something, whatever it is, as UTF-8 can write them."""
    if isinstance(data, str):
        return data[:EXCERPT_CHARACTERS].encode("utf-8", "replace").decode()
    return data[:EXCERPT_CHARACTERS].decode("utf-8", "replace")


def writable(text: str) -> bool:
    """Whether UTF-8 can write a text: one half of a surrogate pair it cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def too_long(place: str, what: str, start: bytes | str, max_bytes: int) -> Reject:
    """The reject for something longer than a document may be."""
    reason = f"{what} is longer than {max_bytes / 1e6:g} MB, `ingest.max_document_mb`"
    return Reject(place, "too long", reason, excerpt(start))
