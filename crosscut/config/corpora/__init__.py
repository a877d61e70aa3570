"""Configuration of a corpus: its sources and the stages of its preparation."""

from crosscut.config.corpora.corpus import CorpusConfig
from crosscut.config.corpora.sources import Cleaner, Extraction, HtmlConfig, IngestConfig, SourceConfig, SourceFormat
from crosscut.config.corpora.stages import (
    CleaningConfig,
    DuplicatesConfig,
    EngineConfig,
    EngineKind,
    LanguageConfig,
    LanguageDetector,
    LeakageAction,
    LeakageConfig,
    LengthConfig,
    Normalization,
    TokensConfig,
    UrlsConfig,
)

__all__ = [
    "Cleaner",
    "CleaningConfig",
    "CorpusConfig",
    "DuplicatesConfig",
    "EngineConfig",
    "EngineKind",
    "Extraction",
    "HtmlConfig",
    "IngestConfig",
    "LanguageConfig",
    "LanguageDetector",
    "LeakageAction",
    "LeakageConfig",
    "LengthConfig",
    "Normalization",
    "SourceConfig",
    "SourceFormat",
    "TokensConfig",
    "UrlsConfig",
]
