"""Choosing the next token: a function of the scores, the text so far and one number.

Every rank sees the same scores and works out the same number, so the ranks agree without sending their choice. The
number is a function of (seed, sample, the tokens so far): what a text becomes depends neither on the layout nor on what
else is written beside it, one that is taken up in the middle goes on as it would have, and different prompts under one
seed have nothing to do with each other.

Scores s become probabilities in the order that others use, too: repetition penalty, temperature, the top k, the top p.

    p_i = exp(s_i / t) / sum over what is left of exp(s_j / t)

Shapes: V vocabulary.
"""

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.config import ConfigError
from crosscut.config.checks import require_at_least

_LIKELIEST = 1024
"""Tokens that are sorted to find the top p; more where these do not come to it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a text goes on and where it ends. Raises `ConfigError` for what cannot be."""

    num_tokens: int = 200
    """Longest continuation."""
    temperature: float = 0.8
    """Spread of the choices; 0 takes the likeliest."""
    top_k: int = 50
    """Choose among this many likeliest tokens; 0 among all."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Scores of tokens that the text already holds are divided by it where positive, multiplied where negative."""
    seed: int = 0
    """Seed of the choices."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    alternatives: int | None = None
    """How many of the likeliest tokens to tell beside each choice, with log probabilities; None tells none at all."""

    def __post_init__(self) -> None:
        for name, minimum in (("num_tokens", 1), ("temperature", 0), ("top_k", 0), ("alternatives", 0)):
            if (value := getattr(self, name)) is not None:
                require_at_least(name, value, minimum)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"`top_p` must be above 0 and at most 1, but is {self.top_p}.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(f"`repetition_penalty` must be a number above 0, but is {self.repetition_penalty}.")
        if "" in self.stop:
            raise ConfigError("`stop` must hold texts to stop at, but one of them is empty. Leave it out.")


@dataclass(frozen=True)
class Likelihood:
    """What the model thought of a token before penalty, temperature and cuts."""

    logprob: float
    """Natural logarithm of the chosen token's probability."""
    alternatives: tuple[tuple[int, float], ...]
    """The likeliest tokens and theirs, likeliest first."""


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


def choose(scores: Tensor, sampling: Sampling, *, seen: Collection[int], number: float) -> int:
    """The next token by the `scores` [V] in float32, after the tokens `seen` in prompt and text.

    Tokens that are left are laid side by side in the order of their ids, each as wide as its probability; the choice
    is where `number` falls. So scores that differ in their last digits give the same choice but at a border, which an
    order by probability would not.
    """
    if sampling.repetition_penalty != 1.0 and seen:
        scores = _penalized(scores, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(scores.argmax())
    chances, tokens = _candidates(scores, sampling)
    tokens, order = tokens.sort()
    ends = chances[order].cumsum(0)
    place = int(torch.searchsorted(ends, ends[-1] * number, right=True))
    return int(tokens[min(place, len(tokens) - 1)])


def likelihood_of(scores: Tensor, token: int, num_alternatives: int) -> Likelihood:
    """How likely the model found a token, by its `scores` [V], and which it found likeliest."""
    total = scores.logsumexp(0)
    values, tokens = scores.topk(min(num_alternatives, scores.numel()))
    told = zip(tokens.tolist(), (values - total).tolist(), strict=True)
    return Likelihood(float(scores[token] - total), tuple(told))


def _penalized(scores: Tensor, seen: Collection[int], penalty: float) -> Tensor:
    index = torch.tensor(sorted(seen), device=scores.device)
    found = scores[index]
    return scores.index_copy(0, index, torch.where(found > 0, found / penalty, found * penalty))


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
