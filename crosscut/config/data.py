"""Text or tokens on which a run trains, and the objective for which the tokens are made."""

from dataclasses import dataclass
from math import inf

from crosscut.config.checks import (
    Choice,
    LocalPath,
    check_section,
    require_at_least,
    require_local_paths,
    require_value,
    shown,
)
from crosscut.config.errors import ConfigError

SHORTEST_PAIR = 5
"""Number of tokens of the shortest pair of segments: `[CLS]`, one token, `[SEP]`, one token, `[SEP]`."""


class Objective(Choice):
    """The choices for `data.objective` and `tokens.objective`."""

    CAUSAL = "causal"
    MASKED = "masked"


@dataclass(frozen=True, kw_only=True)
class MixedFolder:
    """One `[[data.mixture]]` section: a token folder and its weight."""

    folder: LocalPath
    """Folder of token shards."""

    weight: float
    """Weight of the folder. Its share of the training tokens is its weight divided by the sum of all weights. The
    number of tokens, documents or files in the folder has no effect on the share."""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ConfigError("`data.mixture.folder` must name a folder of token shards, but is empty.")
        require_local_paths(self, "data.mixture")
        if not 0 < self.weight < inf:
            raise ConfigError(
                f"`data.mixture.weight` of `{self.folder}` must be above 0 and finite, but is {self.weight}. To "
                "leave out the folder, remove its section."
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text or tokens on which the run trains (paper, section 4.1.3)."""

    text: tuple[LocalPath, ...] = ()
    """Raw text to train on: .txt, .jsonl, .parquet and .tsv files, folders of the first three, or globs. Files in .txt,
    .jsonl and .tsv may be compressed (.gz or .zst). On the command line, several names need only commas between them:
    `data.text=a.txt,b.txt`. `builtin:tales` and `builtin:state-of-the-union` come with Crosscut. Leave
    `text` empty if `tokens` already holds shards."""

    tokens: LocalPath = ""
    """Folder of token shards. If the folder does not exist, it is created from `text`. Empty means `tokens` in the
    run's folder."""

    mixture: tuple[MixedFolder, ...] = ()
    """List of token folders to train on together, as sections `[[data.mixture]]` with the keys `folder` and `weight`
    (docs/data.md). All folders must have the same tokenizer. With a mixture, `text` and `tokens` must be empty."""

    tokenizer: LocalPath = ""
    """Path of a `tokenizer.json`, or of BERT's `vocab.txt`. If empty, a tokenizer is trained on `text`: a byte-level
    BPE, or a WordPiece with `objective = "masked"`."""

    vocab_size: int = 8192
    """Vocabulary size of the tokenizer that is trained if `tokenizer` is empty."""

    objective: Objective = Objective.CAUSAL
    """Kind of prediction for which the tokens are made: `causal` predicts each token from the tokens before it, as in
    GPT; `masked` predicts masked tokens from the tokens on both sides, as in BERT. A tokenizer for `masked` needs the
    special tokens of BERT or RoBERTa, and the tokens get an index of sentences (docs/data.md)."""

    pairs: bool = True
    """Form of a sample with `objective = "masked"`. With `true`, a sample is a pair of consecutive segments of a
    document, padded to the sequence length. In half of the samples, the two segments are swapped, and the model
    predicts their order. With `false`, documents are packed into full sequences, as in RoBERTa."""

    mask_fraction: float = 0.15
    """Fraction of the words to mask, with `objective = "masked"`. BERT uses 0.15."""

    mask_words: int = 3
    """Maximum number of consecutive words that are masked together. A group of n words is chosen with a probability
    proportional to 1 / n. With 1, only single words are masked."""

    text_key: str = "text"
    """Key (jsonl) or column (parquet, tsv) of the text."""

    num_shards: int = 5
    """Number of training shards. The order of the shards is shuffled in every epoch. The paper uses 5."""

    train_to_validation: int = 29
    """Number of training documents per validation document. The paper splits 29:1. A .txt file belongs as a whole
    either to training or to validation. Such a file is split only if it is larger than 64 MiB, or larger than the share
    of the text that is used for validation."""

    verify: bool = True
    """Whether to check every shard against the manifest's hashes before the run starts."""

    def __post_init__(self) -> None:
        check_section(self, "data", vocab_size=257)
        self._check_masking()
        self._check_mixture()
        check_section(self, "data", num_shards=1, train_to_validation=1)

    @property
    def has_sentences(self) -> bool:
        """Whether the tokens have an index of sentences."""
        return self.objective is Objective.MASKED

    def _check_masking(self) -> None:
        require_at_least("data.mask_words", self.mask_words, 1)
        if self.mask_words > 10:
            raise ConfigError(f"`data.mask_words` must be at most 10, but is {self.mask_words}. Try 3.")
        if not 0 < self.mask_fraction <= 0.5:
            raise ConfigError(
                f"`data.mask_fraction` must be above 0 and at most 0.5, but is {self.mask_fraction}. BERT uses 0.15."
            )
        if self.objective is Objective.CAUSAL:
            for name in ("pairs", "mask_fraction", "mask_words"):
                default, remedy = getattr(type(self), name), f'Remove `data.{name}`, or set data.objective="masked".'
                when = 'with `data.objective` = "causal"'
                require_value(f"data.{name}", getattr(self, name), default, when, remedy)

    def _check_mixture(self) -> None:
        if not self.mixture:
            return
        for name in ("text", "tokens"):
            if value := getattr(self, name):
                empty = "[]" if name == "text" else '""'
                raise ConfigError(
                    f"`data.{name}` must be empty with `data.mixture`, but is {shown(value)}. Set data.{name}={empty}, "
                    "or remove `data.mixture`."
                )
        folders = [part.folder for part in self.mixture]
        if twice := next((folder for folder in folders if folders.count(folder) > 1), ""):
            raise ConfigError(
                f"`data.mixture` must name each folder once, but names `{twice}` {folders.count(twice)} times. Name "
                "the folder once, with the sum of its weights."
            )
