"""Settings of the stages that turn documents into token shards, and of the engine that runs the stages."""

from dataclasses import asdict, dataclass, fields
from typing import Self

from crosscut.config.checks import (
    Choice,
    LocalPath,
    check_section,
    require_at_least,
    require_fraction,
    require_local_paths,
    resolve_choices,
)
from crosscut.config.data import Objective
from crosscut.config.errors import ConfigError


class LanguageDetector(Choice):
    """The choices for `language.detector`."""

    ELDC = "eldc"
    LANGDETECT = "langdetect"


class LeakageAction(Choice):
    """The choices for `leakage.action`."""

    REPORT = "report"
    ARTICLES = "articles"
    DOCUMENT = "document"
    PASSAGE = "passage"


class Normalization(Choice):
    """The choices for `cleaning.normalization`."""

    NONE = "none"
    NFC = "NFC"


class EngineKind(Choice):
    """The choices for `engine.kind`."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, kw_only=True)
class UrlsConfig:
    """Filter by a document's URL. Documents without a URL pass."""

    domains: tuple[LocalPath, ...] = ("builtin:domains",)
    """Files that list domains to drop, one domain per line. The subdomains are also dropped. `builtin:domains` is a
    short list of image, video and adult hosts. An empty list drops no domain."""

    types: tuple[LocalPath, ...] = ("builtin:types",)
    """Files that list file types to drop, one suffix per line. `builtin:types` is a short list (jpg, exe, ppt, ...)."""

    min_karma: float = 3.0
    """Minimum number of votes for a document's link. Documents without a number of votes pass. The paper uses 3."""

    duplicates: bool = True
    """Whether to keep only the first of several documents with the same URL."""

    def __post_init__(self) -> None:
        require_local_paths(self, "urls")


@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """Repair of text with the library ftfy, for all sources. Each key is one of ftfy's steps. The defaults repair
    damage and leave correct text of every language unchanged. Switch on all keys to get ftfy's own defaults, which suit
    English (docs/corpus-text.md).
    """

    fix_encoding: bool = True
    """Whether to repair mojibake, which is text that was decoded with a wrong charset. This key also repairs the
    control characters of Latin-1, and replaces halves of surrogate pairs with U+FFFD."""

    unescape_html: bool = True
    """Whether to decode HTML entities such as `&amp;`. The decoding of a text stops at its first line that contains a
    `<`."""

    fix_line_breaks: bool = True
    """Whether to turn all line ends (CRLF, CR, U+2028 and U+2029) into newlines. If `fix_encoding` is off, U+0085 also
    becomes a newline; otherwise `fix_encoding` makes it an ellipsis."""

    remove_control_chars: bool = True
    """Whether to remove control characters that do not affect the text, and the colour codes of terminals."""

    fix_character_width: bool = False
    """Whether to replace full-width letters, digits and punctuation with ASCII, and half-width katakana and hangul with
    full-width characters. Chinese, Japanese and Korean are written with full-width punctuation."""

    fix_latin_ligatures: bool = False
    """Whether to replace ligatures with their letters. Texts from PDF files contain ligatures such as `\ufb01`. The
    letters \u0133 of Dutch and \u01c6 of Croatian are replaced, too."""

    uncurl_quotes: bool = False
    """Whether to replace curly quotation marks and apostrophes with straight ones."""

    normalization: Normalization = Normalization.NONE
    """Unicode normalization: `none`, or `NFC`, which composes letters and their accents. NFC changes letters in
    correctly written Hindi, and the order of vowel signs in Arabic and Hebrew."""

    def __post_init__(self) -> None:
        resolve_choices(self, "cleaning")

    @property
    def repairs(self) -> tuple[str, ...]:
        """Names of the keys that are switched on."""
        return tuple(key for key, value in asdict(self).items() if value and value != Normalization.NONE)

    @classmethod
    def all_or_none(cls, everything: bool) -> Self:
        """Return the settings with all repairs switched on (ftfy's own defaults) or with all repairs switched off."""
        steps = {field.name: everything for field in fields(cls) if field.name != "normalization"}
        return cls(**steps, normalization=Normalization.NFC if everything else Normalization.NONE)


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Filter by language."""

    keep: tuple[str, ...] = ("en",)
    """ISO 639-1 codes of the languages to keep. By default, only English is kept. An empty list keeps all languages and
    skips the detection. A code that the detector does not know is refused; the message lists the known codes."""

    detector: LanguageDetector = LanguageDetector.ELDC
    """Language detector: `eldc`, which is fast, or `langdetect`, which the paper used."""

    min_score: float = 0.0
    """Minimum certainty of the detector, at least 0 and below 1. Documents with a lower certainty are dropped, even if
    their language is in `keep`."""

    def __post_init__(self) -> None:
        resolve_choices(self, "language")
        require_fraction("language.min_score", self.min_score)


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Filter by length."""

    min_tokens: int = 128
    """Minimum length of a document in tokens of the corpus's tokenizer. The paper uses 128; 0 keeps all documents."""

    def __post_init__(self) -> None:
        require_at_least("length.min_tokens", self.min_tokens, 0)


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Definition of duplicates. One document of each cluster of duplicates is kept."""

    jaccard: float = 0.7
    """Minimum Jaccard similarity of near-duplicates: the number of word n-grams that two documents have in common,
    divided by the number of word n-grams that at least one of the two documents contains. The paper uses 0.7; 1 removes
    only documents with the same text."""

    recall: float = 0.99
    """Fraction of near-duplicate pairs that the search must find, among the pairs with a similarity of exactly
    `jaccard`. A pair with a higher similarity is found with a higher probability. The number of bands and rows of the
    search follows from this value."""

    ngram: int = 5
    """Number of words in an n-gram."""

    against: tuple[LocalPath, ...] = ()
    """Output folders of earlier corpora. A document of this corpus that duplicates a document of an earlier corpus is
    dropped. The earlier corpora are not changed."""

    def __post_init__(self) -> None:
        if not 0.3 <= self.jaccard <= 1:
            raise ConfigError(
                f"`duplicates.jaccard` must be between 0.3 and 1, but is {self.jaccard}. The paper uses 0.7."
            )
        if not 0 < self.recall <= 0.9999:
            raise ConfigError(f"`duplicates.recall` must be above 0 and at most 0.9999, but is {self.recall}.")
        check_section(self, "duplicates", ngram=1)


@dataclass(frozen=True, kw_only=True)
class LeakageConfig:
    """Removal of text that also occurs in test sets."""

    test_sets: tuple[LocalPath, ...] = ()
    """Files of test sets: .jsonl (one text per line), .txt, or WikiText's `wiki.test.raw` and `wiki.test.tokens`."""

    text_key: str = "text"
    """Key of the text in jsonl test sets."""

    ngram: int = 8
    """Number of words in the n-grams by which documents are compared with test sets. The paper uses 8."""

    false_positives: float = 1e-3
    """False-positive rate of the Bloom filters. One filter holds the n-grams of the test sets; every hit in it is
    checked exactly, so the rate does not change the result. With the actions `articles` and `report`, another filter
    holds the n-grams of the corpus, and gives the overlap as the paper measures it. The paper uses 1e-3."""

    action: LeakageAction = LeakageAction.PASSAGE
    """Treatment of a document that shares n-grams with a test set: `passage` cuts out the n-grams with a margin,
    `document` drops the document, `articles` drops only documents that are an article of the test set (the paper's
    treatment), `report` only counts the document."""

    margin: int = 200
    """Number of characters to cut on each side of a shared passage."""

    min_matches: int = 1
    """Minimum number of n-grams that a document must share with the test sets to be cut or dropped."""

    max_cuts: int = 10
    """Maximum number of cuts per document. A document that needs more cuts is dropped."""

    def __post_init__(self) -> None:
        resolve_choices(self, "leakage")
        check_section(self, "leakage", ngram=1, margin=0, min_matches=1, max_cuts=1)
        if not 0 < self.false_positives <= 0.1:
            raise ConfigError(
                f"`leakage.false_positives` must be above 0 and at most 0.1, but is {self.false_positives}."
            )


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Token shards of the corpus, which a run reads with `data.tokens` (docs/data.md)."""

    tokenizer: LocalPath = ""
    """Path of a `tokenizer.json`, or of BERT's `vocab.txt`. A tokenizer without an end-of-text token is refused. If
    empty, a tokenizer is trained on the first 100 million characters of the cleaned text: a byte-level BPE, or a
    WordPiece with `objective = "masked"`."""

    vocab_size: int = 32768
    """Vocabulary size of the tokenizer that is trained if `tokenizer` is empty."""

    objective: Objective = Objective.CAUSAL
    """Kind of prediction for which the tokens are made: `causal` (GPT) or `masked` (BERT), as in `data.objective` of a
    run."""

    num_shards: int = 5
    """Number of training shards. The paper uses 5."""

    train_to_validation: int = 29
    """Number of training documents per validation document. The paper splits 29:1."""

    megatron: bool = False
    """Whether to also write each shard as a `.bin` and `.idx` pair for Megatron-LM."""

    def __post_init__(self) -> None:
        resolve_choices(self, "tokens")
        check_section(self, "tokens", vocab_size=257, num_shards=1, train_to_validation=1)

    @property
    def has_sentences(self) -> bool:
        """Whether the tokens have an index of sentences."""
        return self.objective is Objective.MASKED


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Execution engine. Every engine gives the same result."""

    kind: EngineKind = EngineKind.LOCAL
    """`local` uses processes on this machine; `ray` uses a Ray cluster, whose machines must see the output's folder
    and all local files of the configuration under the same paths."""

    address: str = "auto"
    """Address of the Ray cluster. `auto` finds the cluster to which this machine belongs; `local` starts a cluster on
    this machine."""

    workers: int = 0
    """Number of tasks that run at the same time. 0 means one task per core of this machine or, with Ray, of the whole
    cluster. On this machine, at most 32 tasks per core are allowed."""

    def __post_init__(self) -> None:
        resolve_choices(self, "engine")
        require_at_least("engine.workers", self.workers, 0)
