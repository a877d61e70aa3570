"""Configuration of a corpus: the sources of its text, the filters, and the token shards (paper, section 4.1.2).

A corpus is one TOML file for `crosscut prepare`, with a section for each field of `CorpusConfig` and a `[[sources]]`
section for each source.
"""

from dataclasses import dataclass, field

from crosscut.config.checks import MOST_SEED, LocalPath, listed, require_at_least, require_local_paths
from crosscut.config.corpora.sources import HtmlConfig, IngestConfig, SourceConfig, SourceFormat
from crosscut.config.corpora.stages import (
    CleaningConfig,
    DuplicatesConfig,
    EngineConfig,
    LanguageConfig,
    LeakageConfig,
    LengthConfig,
    TokensConfig,
    UrlsConfig,
)
from crosscut.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Complete description of a corpus, sufficient to make the corpus again."""

    sources: tuple[SourceConfig, ...]
    folder: LocalPath
    """Output folder for `tokens`, `report.html`, `report.json`, `timings.json`, `config.toml`, and `work` with the
    intermediate files of the stages."""

    seed: int = 1234
    """Seed of all random choices: the split into training and validation documents, the documents that a source's
    `weight` selects, the samples in the report, and the documents that are copied to measure how many duplicates the
    search finds."""

    ingest: IngestConfig = field(default_factory=IngestConfig)
    html: HtmlConfig = field(default_factory=HtmlConfig)
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
        require_local_paths(self, "")
        if not self.sources:
            raise ConfigError("`sources` must name at least one source, but is empty. Add a [[sources]] section.")
        require_at_least("seed", self.seed, 0, maximum=MOST_SEED)
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"`sources.name` must be unique, but several sources have the name {listed(twice)}. Rename a source."
            )
        if any(source.format == SourceFormat.MEGATRON for source in self.sources) and not self.tokens.tokenizer:
            raise ConfigError(
                "`tokens.tokenizer` must name the `tokenizer.json` that made the tokens of a `megatron` source, but "
                "is empty."
            )
