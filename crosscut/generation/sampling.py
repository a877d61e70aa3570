"""Choosing the next token: a function of the scores, the text so far and one number.

Every rank sees the same scores and works out the same number, so the ranks agree without sending their choice. The
number is a function of (seed, sample, the tokens so far): what a text becomes depends neither on the layout nor on what
else is written beside it, one that is taken up in the middle goes on as it would have, unless penalties count only what
comes after the prompt, and different prompts under one seed have nothing to do with each other.

Scores s become probabilities in the order that others use, too: biases b, repetition penalty, presence and frequency
penalty (token i has been written c_i times after the prompt), temperature, the top k, the top p.

    s_i <- repetition(s_i + b_i) - presence (1 if c_i > 0 else 0) - frequency c_i
    p_i = exp(s_i / t) / sum over what is left of exp(s_j / t)

Shapes: V vocabulary.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.config import ConfigError
from crosscut.config.checks import require_at_least

LARGEST_PENALTY = 2.0
"""Largest absolute value of the presence penalty and of the frequency penalty."""

_LIKELIEST = 1024
"""Tokens that are sorted to find the top p; more where these do not come to it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options for choosing a text's next tokens and its end. Raises `ConfigError` for values out of range."""

    num_tokens: int = 200
    """Longest continuation; 0 only reads the prompt."""
    temperature: float = 0.8
    """Spread of the choices; 0 takes the likeliest."""
    top_k: int = 50
    """Choose among this many likeliest tokens; 0 among all."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Scores of tokens that the text already holds are divided by it where positive, multiplied where negative."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens that have been written after the prompt."""
    frequency_penalty: float = 0.0
    """Subtracted from the score of a token once for each time that it has been written after the prompt."""
    bias: tuple[tuple[int, float], ...] = ()
    """Token ids and the numbers added to their scores."""
    seed: int = 0
    """Seed of the choices."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    alternatives: int | None = None
    """Number of likeliest tokens to report beside each choice, with log probabilities; None reports none at all."""
    tell_prompt: bool = False
    """Whether to tell the prompt's tokens, too, before those that are written."""

    def __post_init__(self) -> None:
        for name in ("num_tokens", "temperature", "top_k", "alternatives"):
            if (value := getattr(self, name)) is not None:
                require_at_least(name, value, 0)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -LARGEST_PENALTY <= (value := getattr(self, name)) <= LARGEST_PENALTY:
                raise ConfigError(f"`{name}` must be from {-LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}, but is {value}.")
        if not all(math.isfinite(bias) for _, bias in self.bias):
            raise ConfigError(f"`bias` must hold numbers to add to scores, but one of {dict(self.bias)} is none.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"`top_p` must be above 0 and at most 1, but is {self.top_p}.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(f"`repetition_penalty` must be a number above 0, but is {self.repetition_penalty}.")
        if "" in self.stop:
            raise ConfigError("`stop` must hold texts to stop at, but one of them is empty. Leave it out.")


@dataclass(frozen=True)
class Likelihood:
    """Log probabilities that the model gives before penalties, temperature and cuts."""

    logprob: float | None = None
    """Natural logarithm of the token's probability; None where nobody asked."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, likeliest first."""


class Numbers:
    """The numbers that choose a text's tokens, each a function of the seed, the sample and the tokens so far."""

    def __init__(self, seed: int, sample: int, tokens: Iterable[int] = ()) -> None:
        self._hash = hashlib.blake2b(f"sample/{seed}/{sample}".encode(), digest_size=8)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """The text goes on with a token."""
        self._hash.update(b"/%d" % token)

    def next(self) -> float:
        """The number for the token that follows: at least 0, below 1, and any as likely as any other."""
        return (int.from_bytes(self._hash.digest(), "little") >> 11) / 2**53  # the bits that a float keeps


class History:
    """Token counts of a text for the penalties: the tokens that it holds, and how often each has been written."""

    def __init__(self, sampling: Sampling, prompt: Iterable[int] = (), written: Iterable[int] = ()) -> None:
        self._keeps_seen = sampling.repetition_penalty != 1.0
        self._keeps_counts = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self.seen = set(prompt) if self._keeps_seen else set()
        """Tokens of prompt and text, where their repetition is penalized."""
        self.counts: Counter[int] = Counter()
        """Count of each token in the text after the prompt, where presence or frequency is penalized."""
        for token in written:
            self.add(token)

    def add(self, token: int) -> None:
        """The text goes on with a token."""
        if self._keeps_seen:
            self.seen.add(token)
        if self._keeps_counts:
            self.counts[token] += 1


def choose(scores: Tensor, sampling: Sampling, *, history: History, number: float) -> int:
    """The next token of a text by its `scores` [V] in float32.

    Tokens that are left are laid side by side in the order of their ids, each as wide as its probability; the choice
    is where `number` falls. So scores that differ in their last digits give the same choice but at a border, which an
    order by probability would not.
    """
    scores = _adjusted(scores, sampling, history)
    if sampling.temperature == 0:
        return int(scores.argmax())
    chances, tokens = _candidates(scores, sampling)
    tokens, order = tokens.sort()
    ends = chances[order].cumsum(0)
    place = int(torch.searchsorted(ends, ends[-1] * number, right=True))
    return int(tokens[min(place, len(tokens) - 1)])


def likelihoods_of(scores: Tensor, tokens: Sequence[int], num_alternatives: int) -> list[Likelihood]:
    """Likelihood of each of N tokens by its row of `scores` [N, V], with the likeliest tokens of that row."""
    total = scores.logsumexp(1, keepdim=True)
    found = scores.gather(1, torch.tensor(tokens, device=scores.device).unsqueeze(1))
    values, likeliest = scores.topk(min(num_alternatives, scores.shape[1]))
    told = zip((found - total).flatten().tolist(), likeliest.tolist(), (values - total).tolist(), strict=True)
    return [Likelihood(logprob, tuple(zip(others, theirs, strict=True))) for logprob, others, theirs in told]


def _adjusted(scores: Tensor, sampling: Sampling, history: History) -> Tensor:
    """Scores [V] after biases and penalties; the given ones are left as they are."""
    if sampling.bias:
        index, added = _columns(sampling.bias, scores)
        scores = scores.index_add(0, index, added)
    if history.seen:
        index = torch.tensor(sorted(history.seen), device=scores.device)
        found, penalty = scores[index], sampling.repetition_penalty
        scores = scores.index_copy(0, index, torch.where(found > 0, found / penalty, found * penalty))
    if history.counts:
        index, counts = _columns(history.counts.items(), scores)
        scores = scores.index_add(0, index, -(sampling.presence_penalty + sampling.frequency_penalty * counts))
    return scores


def _columns(of_token: Iterable[tuple[int, float]], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and what belongs to each, as tensors beside the scores."""
    tokens, values = zip(*of_token, strict=True)
    return torch.tensor(tokens, device=scores.device), torch.tensor(values, dtype=scores.dtype, device=scores.device)


def _candidates(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens to choose among and their probabilities up to a factor, in float64, on the CPU."""
    size = scores.numel()
    if 0 < sampling.top_k < size:
        values, tokens = scores.topk(sampling.top_k)
        chances = _chances(values, sampling.temperature)
    else:
        chances, tokens = _chances(scores, sampling.temperature), torch.arange(size)
    mass = float(chances.sum()) * sampling.top_p
    if sampling.top_p < 1.0 and len(tokens) == size:
        chances, tokens = _likeliest(chances, mass)
    chances, tokens = chances.cpu(), tokens.cpu()
    if sampling.top_p < 1.0:
        count = int(torch.searchsorted(chances.cumsum(0), mass)) + 1
        chances, tokens = chances[:count], tokens[:count]
    return chances, tokens


def _chances(scores: Tensor, temperature: float) -> Tensor:
    return ((scores.double() - scores.max()) / temperature).exp()


def _likeliest(chances: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """So many of the tokens that they have the mass, likeliest first: a few are found faster than all are sorted."""
    values, tokens = chances.topk(min(_LIKELIEST, chances.numel()))
    return (values, tokens) if float(values.sum()) >= mass else chances.sort(descending=True)
