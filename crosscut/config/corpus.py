"""Configuration of a corpus: the sources of its text, the filters, and the token shards (paper, section 4.1.2).

One TOML file that `crosscut prepare` takes, with the sections below and one `[[sources]]` for each source.
"""

import re
from dataclasses import dataclass, field

from crosscut.config.checks import Choice, listed, require_at_least, require_fraction, resolve_choices
from crosscut.config.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class SourceFormat(Choice):
    """Values of `sources.format`."""

    AUTO = "auto"
    JSONL = "jsonl"
    PARQUET = "parquet"
    TEXT = "text"
    HTML = "html"
    MAIL = "mail"
    WIKIPEDIA = "wikipedia"
    MEGATRON = "megatron"


class Cleaner(Choice):
    """Values that `sources.cleaners` may hold."""

    JOIN_LINES = "join_lines"


class Detector(Choice):
    """Values of `language.detector`."""

    ELDC = "eldc"
    LANGDETECT = "langdetect"


class LeakageAction(Choice):
    """Values of `leakage.action`."""

    REPORT = "report"
    DOCUMENT = "document"
    PASSAGE = "passage"


class EngineKind(Choice):
    """Values of `engine.kind`."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One `[[sources]]`: files of one kind that are read, cleaned and weighted alike."""

    name: str
    """Name of the source in document ids and the report."""

    files: tuple[str, ...]
    """Files, folders, globs or URLs that fsspec knows, such as `s3://bucket/part-*.jsonl.zst`; .gz and .zst are
    unpacked."""

    format: SourceFormat = SourceFormat.AUTO
    """`jsonl`, `parquet`, `text` (a file is a document), `html`, `mail` (a message a file, or an mbox), `wikipedia` (an
    XML dump), `megatron` (the `.idx` beside a `.bin` of tokens, read with `tokens.tokenizer`), or `auto`: by suffix."""

    text_key: str = "text"
    """Key or column of the text, in jsonl and parquet."""

    url_key: str = "url"
    """Key or column of the document's URL, where there is one."""

    karma_key: str = "karma"
    """Key or column of the votes that the document's link got, where there is one."""

    title_key: str = "title"
    """Key or column of the document's title, where there is one."""

    cleaners: tuple[Cleaner, ...] = ()
    """Repairs for this source alone: `join_lines` removes newlines inside paragraphs, as the paper does for
    CC-Stories."""

    weight: float = 1.0
    """Copies written of each training document of this source: 2 writes each document twice, 0.25 writes a quarter of
    the documents, chosen by the seed."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"`sources.name` must be letters, digits, dots, dashes and underscores, but is {self.name!r}."
            )
        if not self.files:
            raise ConfigError(f"`sources.files` of `{self.name}` must name files or URLs, but is empty.")
        resolve_choices(self, "sources")
        if not 0 < self.weight <= 100:
            raise ConfigError(f"`sources.weight` must be above 0 and at most 100, but is {self.weight}.")


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """Reading: what cannot be read goes to a rejects file with file, place and reason."""

    max_rejects: float = 0.01
    """Share of records that may be rejected before the run stops."""

    max_document_mb: int = 64
    """Longest document in megabytes of text; a longer one is rejected, so that memory has a bound."""

    part_mb: int = 16
    """Text of a part in megabytes: what one process holds at a time and what a killed run has to do again."""

    def __post_init__(self) -> None:
        require_fraction("ingest.max_rejects", self.max_rejects)
        require_at_least("ingest.max_document_mb", self.max_document_mb, 1)
        require_at_least("ingest.part_mb", self.part_mb, 1)


@dataclass(frozen=True, kw_only=True)
class UrlsConfig:
    """Which documents go by their URL; documents without one pass."""

    domains: tuple[str, ...] = ("builtin:domains",)
    """Files of domains to drop, one a line, their subdomains with them; `builtin:domains` is a small list of image,
    video and adult hosts. Empty drops none."""

    types: tuple[str, ...] = ("builtin:types",)
    """Files of file types to drop, one suffix a line; `builtin:types` is a small list (jpg, exe, ppt, ...)."""

    min_karma: float = 3.0
    """Votes that a document's link must have where the number is given. The paper takes 3."""

    duplicates: bool = True
    """Whether of documents with the same URL only the first stays."""


@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """Repairs of the text itself."""

    unicode: bool = True
    """Mend mojibake and normalize characters as ftfy does, remove control characters, write line ends as newlines."""


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Which languages stay."""

    keep: tuple[str, ...] = ("en",)
    """ISO 639-1 codes of languages to keep. Empty keeps all and detects none."""

    detector: Detector = Detector.ELDC
    """`eldc`, which is fast, or `langdetect`, the paper's."""

    min_score: float = 0.0
    """Certainty below which a document of a language to keep goes, 0 to 1."""

    def __post_init__(self) -> None:
        resolve_choices(self, "language")
        require_fraction("language.min_score", self.min_score)


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Shortest document that stays."""

    min_tokens: int = 128
    """Tokens of the run's tokenizer that a document must have. The paper takes 128; 0 keeps all."""

    def __post_init__(self) -> None:
        require_at_least("length.min_tokens", self.min_tokens, 0)


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Criteria by which two documents count as the same text. One document of each cluster stays."""

    jaccard: float = 0.7
    """Similarity above which two documents are near-duplicates: common n-grams of words among all of theirs. The paper
    takes 0.7; 1 removes exact duplicates only."""

    recall: float = 0.99
    """Share of the pairs at exactly that similarity that must be found; more similar ones are found more surely. Bands
    and rows of the search follow from it."""

    ngram: int = 5
    """Words of an n-gram."""

    against: tuple[str, ...] = ()
    """Output folders of earlier runs that this corpus adds to: what they kept is not kept again."""

    def __post_init__(self) -> None:
        if not 0.3 <= self.jaccard <= 1:
            raise ConfigError(f"`duplicates.jaccard` must be 0.3 to 1, but is {self.jaccard}. The paper takes 0.7.")
        if not 0 < self.recall <= 0.9999:
            raise ConfigError(f"`duplicates.recall` must be above 0 and at most 0.9999, but is {self.recall}.")
        require_at_least("duplicates.ngram", self.ngram, 1)


@dataclass(frozen=True, kw_only=True)
class LeakageConfig:
    """Test sets that the corpus must not hold."""

    test_sets: tuple[str, ...] = ()
    """Files of test sets: .jsonl (a text a line), .txt, or WikiText's `wiki.test.raw` and `wiki.test.tokens`."""

    text_key: str = "text"
    """The key of the text in test sets that are jsonl."""

    ngram: int = 8
    """Words of an n-gram that must not occur in both. The paper takes 8."""

    false_positives: float = 1e-3
    """Share of the corpus's n-grams that the Bloom filter lets through by chance; each is then checked exactly."""

    action: LeakageAction = LeakageAction.PASSAGE
    """Treatment of a document that shares n-grams with a test set: `passage` cuts the n-grams out with a margin,
    `document` drops the document, `report` only counts."""

    margin: int = 200
    """Characters that are cut on both sides of a passage."""

    min_matches: int = 1
    """N-grams that a document must share with the test sets before anything happens to it."""

    max_cuts: int = 10
    """A document that would be cut in more places than this is dropped."""

    def __post_init__(self) -> None:
        require_at_least("leakage.ngram", self.ngram, 1)
        require_at_least("leakage.margin", self.margin, 0)
        require_at_least("leakage.min_matches", self.min_matches, 1)
        require_at_least("leakage.max_cuts", self.max_cuts, 1)
        resolve_choices(self, "leakage")
        if not 0 < self.false_positives <= 0.1:
            raise ConfigError(
                f"`leakage.false_positives` must be above 0 and at most 0.1, but is {self.false_positives}."
            )


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """The token shards that come out, for `data.tokens` of a run (docs/data.md)."""

    tokenizer: str = ""
    """A `tokenizer.json` file. Empty trains a byte-level BPE tokenizer on the cleaned text."""

    vocab_size: int = 32768
    """Entries of the tokenizer that is trained when `tokenizer` is empty."""

    num_shards: int = 5
    """Training shards. The paper uses 5."""

    train_to_validation: int = 29
    """Training documents for each validation document. The paper splits 29:1."""

    megatron: bool = False
    """Whether to write each shard also as a `.bin` and `.idx` pair, as Megatron-LM reads it."""

    def __post_init__(self) -> None:
        require_at_least("tokens.vocab_size", self.vocab_size, 257)
        require_at_least("tokens.num_shards", self.num_shards, 1)
        require_at_least("tokens.train_to_validation", self.train_to_validation, 1)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine that runs the work; every engine gives the same result."""

    kind: EngineKind = EngineKind.LOCAL
    """`local`: processes on this machine; `ray`: an existing Ray cluster whose machines share the output's disk."""

    address: str = "auto"
    """Address of the Ray cluster; `auto` finds the one that this machine belongs to, `local` starts one here."""

    workers: int = 0
    """Tasks at a time. 0 takes one for each core."""

    def __post_init__(self) -> None:
        resolve_choices(self, "engine")
        require_at_least("engine.workers", self.workers, 0)


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """All that a corpus is; enough to make it again."""

    sources: tuple[SourceConfig, ...]
    folder: str
    """Where it all goes: `tokens`, `report.html`, `report.json`, `config.toml`, and the stages' parts in `work`."""

    seed: int = 1234
    """Seed of the split, of the weights and of samples in the report."""

    ingest: IngestConfig = field(default_factory=IngestConfig)
    urls: UrlsConfig = field(default_factory=UrlsConfig)
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    length: LengthConfig = field(default_factory=LengthConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    leakage: LeakageConfig = field(default_factory=LeakageConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not self.folder:
            raise ConfigError("`folder` must name a folder for the corpus, but is empty.")
        if not self.sources:
            raise ConfigError("`sources` must name at least one source, but is empty. Add a [[sources]] section.")
        require_at_least("seed", self.seed, 0)
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"`sources.name` must be another for each source, but {listed(twice)} is there twice.")
        if any(source.format == SourceFormat.MEGATRON for source in self.sources) and not self.tokens.tokenizer:
            raise ConfigError(
                "`tokens.tokenizer` must name the tokenizer that a `megatron` source was made with, but is empty."
            )
