"""Sources of a corpus: files of text, and how they are read."""

import re
from dataclasses import dataclass

from crosscut.config.checks import (
    Choice,
    LocalPath,
    check_section,
    require_fraction,
    require_local_paths,
    resolve_choices,
)
from crosscut.config.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class SourceFormat(Choice):
    """The choices for `sources.format`."""

    AUTO = "auto"
    JSONL = "jsonl"
    PARQUET = "parquet"
    TEXT = "text"
    HTML = "html"
    MAIL = "mail"
    WIKIPEDIA = "wikipedia"
    MEGATRON = "megatron"
    WARC = "warc"
    WET = "wet"


class Extraction(Choice):
    """The choices for `html.extraction`."""

    FAST = "fast"
    CAREFUL = "careful"


class Cleaner(Choice):
    """The choices for the items of `sources.cleaners`."""

    JOIN_LINES = "join_lines"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One `[[sources]]` section: files of one kind, which share the format, the cleaning and the weight."""

    name: str
    """Name of the source in document ids and the report."""

    files: tuple[str, ...]
    """Files, folders, globs or URLs that fsspec supports, such as `s3://bucket/part-*.jsonl.zst`. `s3://` needs the
    extra `s3`; other protocols need the package with which fsspec reads them. Compressed files (.gz, .zst and .bz2) are
    decompressed, except parquet files and Megatron-LM's files. From a folder, only files of the source's format are
    read (docs/corpus-text.md). A named file, or a file that matches a glob, is always read."""

    format: SourceFormat = SourceFormat.AUTO
    """File format: `jsonl`, `parquet`, `text` (one document per file), `html`, `mail` (one message per file, or an
    mbox), `wikipedia` (an XML dump), `megatron` (tokens in Megatron-LM's format: name the `.idx` file, and keep the
    `.bin` file next to it; `tokens.tokenizer` decodes the tokens), `warc` (the responses of a crawl), `wet` (the texts
    of a crawl), or `auto`, which decides by the file's suffix."""

    text_key: str = "text"
    """Key (jsonl) or column (parquet) of the text."""

    url_key: str = "url"
    """Key (jsonl) or column (parquet) of the document's URL. Documents without a URL are allowed."""

    karma_key: str = "karma"
    """Key (jsonl) or column (parquet) of the number of votes for the document's link. Documents without this number are
    allowed."""

    title_key: str = "title"
    """Key (jsonl) or column (parquet) of the document's title. Documents without a title are allowed."""

    links: tuple[LocalPath, ...] = ()
    """Files that list links and their votes, such as those of a forum: on each line a URL, a tab and the number of
    votes (.gz, .zst and .bz2 are decompressed). A document of this source is dropped if the highest number of votes for
    its URL is below `urls.min_karma`. Spellings of a URL count as in `urls.duplicates`."""

    require_link: bool = True
    """Whether to drop documents of this source whose URL is in none of its `links`. Without `links`, this key has no
    effect."""

    cleaners: tuple[Cleaner, ...] = ()
    """Additional repairs for this source: `join_lines` removes newlines inside paragraphs, as the paper does for
    CC-Stories."""

    weight: float = 1.0
    """Number of copies of each training document of this source. 2 writes each document twice, and 0.25 writes a
    quarter of the documents, chosen by the seed."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"`sources.name` must consist of letters, digits, dots, dashes and underscores, but is {self.name!r}."
            )
        if not self.files:
            raise ConfigError(f"`sources.files` of `{self.name}` must name files or URLs, but is empty.")
        resolve_choices(self, "sources")
        require_local_paths(self, "sources")
        if not 0 < self.weight <= 100:
            raise ConfigError(f"`sources.weight` must be above 0 and at most 100, but is {self.weight}.")


@dataclass(frozen=True, kw_only=True)
class HtmlConfig:
    """Extraction of the main text from the pages of `html` and `warc` sources."""

    extraction: Extraction = Extraction.FAST
    """Method of extraction: `fast` uses rules of Crosscut and the library resiliparse; `careful` uses the library
    trafilatura, which takes about seven times as long and lets less boilerplate through (docs/corpus-text.md)."""

    site_boilerplate: bool = True
    """Whether to remove repeated lines, such as menus and footers, from the beginning and end of pages. A line is
    removed if at least half of the pages in the same folder of a site have it there. This also applies to `wet` sources
    (docs/corpus-text.md)."""

    def __post_init__(self) -> None:
        resolve_choices(self, "html")


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """Settings for reading the sources. A rejects file lists each unreadable record with its file, its position and the
    reason.
    """

    max_rejects: float = 0.01
    """Maximum share of each source that may be unreadable, at least 0 and below 1. The run stops if a larger share of
    the records of a source is rejected, or if a larger share of the source's bytes is lost to damage."""

    max_damaged_files: int = 0
    """Maximum number of damaged files in the corpus. A damaged file cannot be read at all, or not to its end:
    compressed data that is truncated or corrupt, a line of JSON that breaks off at the end of the file, a damaged row
    group, a table without the text column, an incomplete dump. The number of lost documents is unknown, so every
    damaged file counts toward this limit. The documents before the damage are used. In a web archive, the documents
    after the damage are used, too."""

    max_document_mb: int = 64
    """Maximum size of a document in megabytes of text. Longer documents are rejected, so that memory stays bounded."""

    part_mb: int = 16
    """Size of a part in megabytes of text. A corpus is processed in parts, and a process holds one part at a time.
    After a run is killed, only its unfinished tasks are repeated. A task covers one part or, in the stage `ingest`, one
    or more whole files."""

    def __post_init__(self) -> None:
        require_fraction("ingest.max_rejects", self.max_rejects)
        check_section(self, "ingest", max_damaged_files=0, max_document_mb=1, part_mb=1)
