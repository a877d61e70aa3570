"""A text while it is written, and the pieces that tell of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from crosscut.generation.sampling import History, Numbers, Sampling, choose
from crosscut.generation.streaming import TextStream

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True)
class Piece:
    """One more token of one text, written or, where `Sampling.tell_prompt` asks for it, of its prompt."""

    number: int
    """Which text: what `Decoder.add` gave."""
    token: int
    """Its id, also of the token that ends the text."""
    text: str = ""
    """New text that is safe to show: whole characters, and nothing that may be the start of a stop string."""
    logprob: float | None = None
    """Natural logarithm of the probability that the model gave the token, where `Sampling.alternatives` asks for it; a
    prompt's first token has none."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and theirs, likeliest first."""
    finish: Finish = ""
    """Why the text ends with this token: an end of text or a stop string came, or there is no room for more."""
    is_prompt: bool = False
    """Whether it is told of the prompt, without its text. A text of no tokens ends with its prompt's last one."""


class Text:
    """A prompt and what has been written after it."""

    def __init__(self, number: int, prompt: Sequence[int], sampling: Sampling, sample: int, stream: TextStream | None):
        self.number, self.sampling, self.stream = number, sampling, stream
        self.tokens, self.numbers = list(prompt), Numbers(sampling.seed, sample, prompt)
        self.history = History(sampling, prompt)
        self.num_prompt, self.most_tokens = len(prompt), len(prompt) + sampling.num_tokens
        self.num_told = 0 if sampling.tell_prompt else len(prompt) - (sampling.num_tokens == 0)
        """Tokens of the prompt that are told, or need not be: of a text of no tokens at least the last one is."""
        self.first = 0
        """The token that it sees first."""
        self.num_read = 0
        """Tokens that its row of the cache holds, from `first` on."""

    @property
    def unread(self) -> int:
        """Tokens that are still to be read before the next one can be chosen."""
        return len(self.tokens) - self.first - self.num_read

    @property
    def is_over(self) -> bool:
        """Whether no token is to be written."""
        return len(self.tokens) == self.most_tokens

    def choose(self, scores: Tensor) -> int:
        """The next token by the scores [V]."""
        return choose(scores, self.sampling, history=self.history, number=self.numbers.next())

    def append(self, token: int, *, is_end: bool) -> tuple[str, Finish]:
        """Add a token: what that adds to the text, and whether it ends it."""
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
        """Text held back so far, at the end of a text; empty where a stop string ended the text."""
        return "" if self.stream is None or self.stream.has_stopped else self.stream.finish()
