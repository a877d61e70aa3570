"""State of a text during generation (`Text`), and the report of a single token (`Piece`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from crosscut.config.generation.sampling import Sampling
from crosscut.generation.sampling import History, Numbers, choose, not_finite
from crosscut.generation.streaming import TextStream

Finish = Literal["", "stop", "length", "error"]


@dataclass(frozen=True)
class Piece:
    """Report on one token of a text: a generated token or, if `Sampling.tell_prompt` is set, a token of the prompt."""

    number: int
    """The text's number, as returned by `Decoder.add`."""
    token: int
    """Token id. A token that ends the text is also reported."""
    text: str = ""
    """New text that later tokens cannot change. The text holds only whole characters, and no part of a possible stop
    string."""
    logprob: float | None = None
    """Natural logarithm of the token's probability. None for the first token of a prompt, and if
    `Sampling.alternatives` is None."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """Ids of the likeliest tokens and their log probabilities, the likeliest token first."""
    finish: Finish = ""
    """Reason why the text ends with this token: "stop" for an end-of-text token or a stop string, "length" for the
    maximum length, "error" for an error. Empty if the text continues."""
    is_prompt: bool = False
    """Whether the token belongs to the prompt. The field `text` is then empty. If no tokens are generated, the report
    of the prompt's last token is the last report of the text.
    """
    error: Exception | None = None
    """Error that ended the text if `finish` is "error", otherwise None. A piece with an error has no new token: `token`
    is the text's last token so far."""


class Text:
    """A prompt and the tokens that have been generated after the prompt."""

    def __init__(self, number: int, prompt: Sequence[int], sampling: Sampling, sample: int, stream: TextStream | None):
        self.number, self.sampling, self.stream = number, sampling, stream
        self.tokens, self.numbers = list(prompt), Numbers(sampling.seed, sample, prompt)
        self.history = History(sampling, prompt)
        self.num_prompt, self.most_tokens = len(prompt), len(prompt) + sampling.num_tokens
        self.num_told = 0 if sampling.tell_prompt else len(prompt) - (sampling.num_tokens == 0)
        """Number of prompt tokens that have been reported or need not be reported. If no tokens are generated, at least
        the last prompt token is reported.
        """
        self.first = 0
        """Index of the first token that the model sees."""
        self.num_read = 0
        """Number of tokens, counted from `first`, whose keys and values are in the text's row of the cache."""

    @property
    def unread(self) -> int:
        """Number of tokens that must be read before the next token can be chosen."""
        return len(self.tokens) - self.first - self.num_read

    @property
    def is_over(self) -> bool:
        """Whether the text has reached its maximum length."""
        return len(self.tokens) == self.most_tokens

    def choose(self, scores: Tensor, *, is_finite: bool = True) -> int:
        """Choose the next token from the scores [V]. `is_finite` says whether all scores are finite; if not,
        `GenerationError` is raised.
        """
        if not is_finite:
            raise not_finite(scores, f"token {len(self.tokens) - self.num_prompt + 1} after the prompt")
        return choose(scores, self.sampling, history=self.history, number=self.numbers.next())

    def append(self, token: int, *, is_end: bool) -> tuple[str, Finish]:
        """Append a token. `is_end` says whether the token ends the text. Returns the new characters that can be shown,
        and the reason why the text ends, which is empty if the text continues.
        """
        self.tokens.append(token)
        self.numbers.add(token)
        self.history.add(token)
        if is_end:
            return "", "stop"
        shown = "" if self.stream is None else self.stream.push(token)
        if self.stream is not None and self.stream.has_stopped:
            return shown, "stop"
        return shown, "length" if self.is_over else ""

    def rest(self) -> str:
        """Return the characters that were held back until the end of the text, or an empty string if a stop string
        ended the text.
        """
        return "" if self.stream is None or self.stream.has_stopped else self.stream.finish()
