"""Options with which the tokens of a text are chosen. `crosscut.generation.sampling` applies them."""

import math
from dataclasses import dataclass

from crosscut.config.checks import require_at_least
from crosscut.config.errors import ConfigError

LARGEST_PENALTY = 2.0
"""Largest absolute value of the presence penalty and of the frequency penalty."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options that decide how a text's tokens are chosen and when the text ends. Raises `ConfigError` for values out of
    range.
    """

    num_tokens: int = 200
    """Maximum number of tokens to generate; 0 only reads the prompt."""
    temperature: float = 0.8
    """Sampling temperature; 0 always takes the likeliest token."""
    top_k: int = 50
    """Number of likeliest tokens to sample from; 0 samples from all tokens."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the smallest set of likeliest tokens whose probabilities reach this total."""
    repetition_penalty: float = 1.0
    """Factor for tokens that are already in the text: positive scores are divided by the factor, negative scores are
    multiplied by it.
    """
    presence_penalty: float = 0.0
    """Number subtracted from the score of every token that occurs after the prompt."""
    frequency_penalty: float = 0.0
    """Number subtracted from a token's score once per occurrence after the prompt."""
    bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a number that is added to the token's score."""
    seed: int = 0
    """Random seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the text. The text ends before the first occurrence of any of them."""
    alternatives: int | None = None
    """Number of likeliest tokens to report with each token, with their log probabilities. None reports no log
    probabilities."""
    tell_prompt: bool = False
    """Whether to report the prompt's tokens before the generated tokens."""

    def __post_init__(self) -> None:
        for name in ("num_tokens", "temperature", "top_k", "alternatives"):
            if (value := getattr(self, name)) is not None:
                require_at_least(name, value, 0)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -LARGEST_PENALTY <= (value := getattr(self, name)) <= LARGEST_PENALTY:
                raise ConfigError(f"`{name}` must be from {-LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}, but is {value}.")
        if not all(math.isfinite(bias) for _, bias in self.bias):
            raise ConfigError(f"`bias` must hold finite numbers, but is {dict(self.bias)}.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"`top_p` must be above 0 and at most 1, but is {self.top_p}.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(f"`repetition_penalty` must be above 0 and finite, but is {self.repetition_penalty}.")
        if "" in self.stop:
            raise ConfigError("`stop` must hold non-empty strings, but one is empty. Remove the empty string.")
