"""Choose the next token from the scores, the text so far and one random number.

All ranks see the same scores and compute the same random number, so they agree without communication. The random number
is a function of (seed, sample, the tokens so far). Three properties follow:

- A text depends neither on the layout nor on other texts.
- An interrupted text continues in the same way if a new request has the whole text so far as its prompt. The presence
  and the frequency penalty are exceptions: they count only the tokens after the prompt, and the tokens that were
  generated before the interruption are now part of the prompt.
- Different prompts with the same seed have independent random numbers.

Scores s become probabilities in the usual order: biases b, repetition penalty, presence and frequency penalty (token i
occurs c_i times after the prompt), temperature t, top k, top p.

    s_i <- repetition(s_i + b_i) - presence (1 if c_i > 0 else 0) - frequency c_i
    p_i = exp(s_i / t) / sum over the remaining tokens j of exp(s_j / t)

Shapes: V vocabulary.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.config import GenerationError
from crosscut.config.generation.sampling import Sampling

_LIKELIEST = 1024
"""Number of likeliest tokens among which top p is applied first. If their total probability is too small, all tokens
are sorted."""


@dataclass(frozen=True)
class Likelihood:
    """The model's log probabilities for one token of a text, before biases, penalties, temperature, top k and top p."""

    logprob: float | None = None
    """Natural logarithm of the token's probability. None if no probabilities are requested."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """Ids of the likeliest tokens and their log probabilities, the likeliest token first."""


class Numbers:
    """Random numbers that choose a text's tokens. Each number is a function of the seed, the sample and the tokens so
    far.
    """

    def __init__(self, seed: int, sample: int, tokens: Iterable[int] = ()) -> None:
        self._hash = hashlib.blake2b(f"sample/{seed}/{sample}".encode(), digest_size=8)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        self._hash.update(b"/%d" % token)

    def next(self) -> float:
        """Random number for the next token, uniform in [0, 1)."""
        return (int.from_bytes(self._hash.digest(), "little") >> 11) / 2**53  # as many bits as a float holds


class History:
    """Data for penalties: the set of all tokens in the text, and the number of occurrences of each generated token."""

    def __init__(self, sampling: Sampling, prompt: Iterable[int] = (), written: Iterable[int] = ()) -> None:
        self._keeps_seen = sampling.repetition_penalty != 1.0
        self._keeps_counts = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self.seen = set(prompt) if self._keeps_seen else set()
        """Tokens of the prompt and the generated text, if a repetition penalty is set."""
        self.counts: Counter[int] = Counter()
        """Number of occurrences of each token after the prompt, if a presence or frequency penalty is set."""
        for token in written:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        if self._keeps_seen:
            self.seen.add(token)
        if self._keeps_counts:
            self.counts[token] += 1


def rows_not_finite(scores: Tensor) -> frozenset[int]:
    """Return the indices of the rows of `scores` [N, V] that hold NaN or an infinite number.

    The rows are summed first, which needs only one pass and one transfer to the host. A row whose sum is finite holds
    only finite scores. A row whose sum is not finite is then searched, because finite scores may add up to infinity.
    """
    sums = scores.sum(1, dtype=torch.float32).isfinite().tolist()
    return frozenset(row for row, is_finite in enumerate(sums) if not is_finite and not scores[row].isfinite().all())


def not_finite(scores: Tensor, place: str) -> GenerationError:
    """Return the error for `scores` that hold NaN or an infinite number. `place` names the token to which the scores
    belong.
    """
    kind = "NaN" if scores.isnan().any() else "infinite"
    return GenerationError(
        f"The model's logits must be finite, but are not: some are {kind} at {place}. The weights are damaged, or the "
        "precision cannot hold the numbers. Try --precision float32; check a checkpoint with `crosscut checkpoint "
        "verify`."
    )


def choose(scores: Tensor, sampling: Sampling, *, history: History, number: float) -> int:
    """Choose the next token of a text from its `scores` [V] in float32, and return the token's id. `number` is the
    random number, from 0 to 1 (exclusive).

    The tokens that top k and top p keep are placed on a line in the order of their ids. Each token takes a length equal
    to its probability, and `number` selects a point on the line. If two layouts compute scores that differ in the last
    digits, they choose different tokens only if `number` is close to a border between two tokens. If the tokens were
    ordered by probability, such a difference could swap two tokens.
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
    """Compute the likelihood of each of N tokens. Row i of `scores` [N, V] gives the probability of token i. Each
    likelihood also lists the `num_alternatives` likeliest tokens of the row.
    """
    total = scores.logsumexp(1, keepdim=True)
    found = scores.gather(1, torch.tensor(tokens, device=scores.device).unsqueeze(1))
    values, likeliest = scores.topk(min(num_alternatives, scores.shape[1]))
    told = zip((found - total).flatten().tolist(), likeliest.tolist(), (values - total).tolist(), strict=True)
    return [Likelihood(logprob, tuple(zip(others, theirs, strict=True))) for logprob, others, theirs in told]


def _adjusted(scores: Tensor, sampling: Sampling, history: History) -> Tensor:
    """Return the scores [V] after biases and penalties. `scores` is not changed."""
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
    """Return the token ids and the values of the pairs in `of_token`, as two tensors on the device of `scores`."""
    tokens, values = zip(*of_token, strict=True)
    return torch.tensor(tokens, device=scores.device), torch.tensor(values, dtype=scores.dtype, device=scores.device)


def _candidates(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the unnormalized probabilities of the candidate tokens, in float64, and the tokens, both on the CPU."""
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
    """Return the probabilities of the likeliest tokens, in descending order, and these tokens. There are enough tokens
    for a total probability of at least `mass`. A small number of tokens is tried first, because this is faster than
    sorting all tokens.
    """
    values, tokens = chances.topk(min(_LIKELIEST, chances.numel()))
    return (values, tokens) if float(values.sum()) >= mass else chances.sort(descending=True)
