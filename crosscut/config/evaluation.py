"""Configuration of the evaluation: the texts on which a model is scored, and the protocols (paper, section 4.2)."""

from dataclasses import dataclass

from crosscut.config.checks import Choice, LocalPath, check_section, require_value
from crosscut.config.errors import ConfigError

PAPERS_WINDOW = 1024
"""Window of the paper's models, in tokens."""

PAPERS_STRIDE = 32
"""Number of tokens by which the paper's window advances (its overlap o)."""


class Detokenizer(Choice):
    """The choices for `evaluation.detokenizer`."""

    PAPER = "paper"
    INVERTIBLE = "invertible"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation during training, by the paper's protocols (section 4.2, docs/evaluation.md)."""

    every: int = 0
    """Number of steps between evaluations. If a task is given, the last step is always evaluated. 0 evaluates only the
    last step."""

    wikitext103: LocalPath = ""
    """File of WikiText-103, `wiki.test.tokens` or `wiki.test.raw`. The score is the perplexity per word. Empty skips
    this task."""

    lambada: LocalPath = ""
    """File of LAMBADA in its raw form: .jsonl, or one passage per line. The score is the accuracy of the last word.
    Empty skips this task."""

    text: tuple[LocalPath, ...] = ()
    """Files, folders or globs of your own text, in the formats of `data.text`. The scores are the perplexity per token
    and per document, and the bits per byte. Empty skips this task."""

    text_key: str = "text"
    """Key (jsonl) or column (parquet, tsv) of the text."""

    window: int = 0
    """Number of tokens that the model sees at once. 0 means 1024 as in the paper, or the model's maximum if the maximum
    is smaller."""

    overlap: int = 0
    """Stride: number of tokens by which the window advances (the paper's overlap o). Each window except the first
    scores only its last `overlap` tokens. 0 means 32 for `wikitext103`, as in the paper, and half of the window for
    `text`. With a window of 1024, a stride of half the window takes a sixteenth of the time of a stride of 32."""

    detokenizer: Detokenizer = Detokenizer.PAPER
    """Rules that convert WikiText's words to text. `paper` uses the rules of the paper's authors, which reproduce the
    paper's number of tokens; `invertible` uses rules that lose no information."""

    mask_seed: int = 0
    """Seed of the masks with which a model that predicts masked tokens is scored on `text`. The masks do not depend on
    the run's own seed, so the scores of several runs with the same tokenizer can be compared."""

    limit: int = 0
    """Maximum number of passages of LAMBADA to score, from the start of the file. 0 scores all passages. WikiText-103
    and your own text are always scored as a whole."""

    batch_size: int = 8
    """Number of windows per forward pass of one data rank. The scores do not depend on this number."""

    def __post_init__(self) -> None:
        check_section(self, "evaluation", every=0, window=0, overlap=0, limit=0, batch_size=1)
        if not self.has_tasks:
            remedy = "Name a file in `evaluation.wikitext103`, `evaluation.lambada` or `evaluation.text`."
            require_value("evaluation.every", self.every, 0, "if there is nothing to score", remedy)
        if not self.lambada:
            remedy = "Only LAMBADA has passages to limit. Remove `evaluation.limit`."
            require_value("evaluation.limit", self.limit, 0, "without `evaluation.lambada`", remedy)

    @property
    def has_tasks(self) -> bool:
        """Whether there is a task to score."""
        return bool(self.wikitext103 or self.lambada or self.text)

    def window_for(self, longest: int) -> int:
        """Window in tokens, for a model that reads at most `longest` tokens. Raises `ConfigError` if the configured
        window or overlap is too large.
        """
        if self.window > longest:
            raise ConfigError(
                f"`evaluation.window` must be at most the model's maximum of {longest} tokens, but is "
                f"{self.window}. Remove `evaluation.window` to use {min(longest, PAPERS_WINDOW)}."
            )
        window = self.window or min(longest, PAPERS_WINDOW)
        slides = self.wikitext103 or self.text  # each passage of LAMBADA is a single window
        if slides and self.overlap > window:
            raise ConfigError(
                f"`evaluation.overlap` must be at most the window's {window} tokens, but is {self.overlap}. The "
                f"setting is the number of tokens by which the window advances. Try {window} (consecutive windows then "
                "share no token), or a smaller number."
            )
        return window

    def require_masked(self) -> None:
        """Raise `ConfigError` for a setting that does not apply to a model that predicts masked tokens."""
        for name in ("wikitext103", "lambada"):
            if value := getattr(self, name):
                raise ConfigError(
                    f"`evaluation.{name}` must be empty for a model that predicts masked tokens, but is `{value}`. The "
                    f"task scores the next token. Remove `evaluation.{name}`, and score the model on your own text "
                    "(`evaluation.text`)."
                )
        remedy = "The score of masked tokens uses windows that share no tokens. Remove `evaluation.overlap`."
        when = "for a model that predicts masked tokens"
        require_value("evaluation.overlap", self.overlap, 0, when, remedy)
        if 0 < self.window < 3:
            raise ConfigError(
                "`evaluation.window` must be at least 3 for a model that predicts masked tokens, but is "
                f"{self.window}. A window holds at least one token between `[CLS]` and `[SEP]`. Try 512."
            )

    def papers_stride(self, window: int) -> int:
        """Stride of `wikitext103` in tokens, for windows of `window` tokens."""
        return self.overlap or min(window, PAPERS_STRIDE)

    def own_stride(self, window: int) -> int:
        """Stride of `text` in tokens, for windows of `window` tokens. By default, the stride is half a window. Each
        token is then read twice. Except in the first window, at least half a window of earlier tokens precedes every
        scored token.
        """
        return self.overlap or max(1, window // 2)
