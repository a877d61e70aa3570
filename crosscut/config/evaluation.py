"""Configuration of the evaluation: the texts that a model is scored on, and the protocols (paper, section 4.2)."""

from dataclasses import dataclass

from crosscut.config.checks import Choice, require_at_least, resolve_choices
from crosscut.config.errors import ConfigError

PAPERS_WINDOW = 1024
"""Tokens that the paper's models read at once."""


class Detokenizer(Choice):
    """Values of `evaluation.detokenizer`."""

    PAPER = "paper"
    INVERTIBLE = "invertible"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Scores while the model trains, by the paper's protocols (section 4.2, docs/evaluation.md)."""

    every: int = 0
    """Steps between evaluations; with something to score, the last step always has one. 0 turns the others off."""

    wikitext103: str = ""
    """A file of WikiText-103, `wiki.test.tokens` or `wiki.test.raw`: perplexity per word. Empty leaves it out."""

    lambada: str = ""
    """LAMBADA in its raw form, .jsonl or a passage a line: accuracy of the last word. Empty leaves it out."""

    text: tuple[str, ...] = ()
    """Files, folders or globs of your own text, as `data.text`: perplexity per token and document, bits per byte."""

    text_key: str = "text"
    """The key or column that holds the text in jsonl and parquet files."""

    window: int = 0
    """Tokens that the model reads at once. 0 takes the paper's 1024, or what the model allows where that is less."""

    overlap: int = 32
    """Tokens by which the window moves on, and of which each window but the first scores its last: the paper's o."""

    detokenizer: Detokenizer = Detokenizer.PAPER
    """Rules that turn WikiText's words into text: `paper` takes those of the paper's authors, which give the paper's
    number of tokens; `invertible` takes rules that lose nothing."""

    batch_size: int = 8
    """Windows that a data rank reads together. No score depends on it."""

    def __post_init__(self) -> None:
        require_at_least("evaluation.every", self.every, 0)
        require_at_least("evaluation.window", self.window, 0)
        for name in ("overlap", "batch_size"):
            require_at_least(f"evaluation.{name}", getattr(self, name), 1)
        resolve_choices(self, "evaluation")
        if self.every and not self.has_tasks:
            raise ConfigError(
                f"`evaluation.every` must be 0 where there is nothing to score, but is {self.every}. Name a file in "
                "`evaluation.wikitext103`, `evaluation.lambada` or `evaluation.text`."
            )

    @property
    def has_tasks(self) -> bool:
        """Whether anything is to be scored."""
        return bool(self.wikitext103 or self.lambada or self.text)

    def window_for(self, longest: int) -> int:
        """The window for a model that reads at most `longest` tokens. Raises `ConfigError` where none fits."""
        if self.window > longest:
            raise ConfigError(
                f"`evaluation.window` must be at most the {longest} tokens that the model reads at once, but is "
                f"{self.window}. Leave it out to take {min(longest, PAPERS_WINDOW)}."
            )
        window = self.window or min(longest, PAPERS_WINDOW)
        slides = self.wikitext103 or self.text  # a passage of LAMBADA is one window
        if slides and self.overlap > window:
            raise ConfigError(
                f"`evaluation.overlap` must be at most the window's {window} tokens, but is {self.overlap}. Try "
                f"{window}, which lets windows follow each other without sharing a token, or fewer."
            )
        return window
