"""Step sizes and decays of a recurrence that is computed in chunks of tokens.

With the step size d and the decay rate r of a head, a token leaves exp(-r d) of the head's state. The decay between two
tokens is a product over the tokens between them. Its logarithm is the sum of the steps of this segment, never a
difference of two longer sums: a difference would lose digits, and a document would depend on the documents before it.
Decays are at least float32.

Shapes: B batch, S sequence, A heads, P elements of a head, G groups, R = A / G heads of a group, N elements of a
group's vectors, Q tokens of a chunk.
"""

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Place(NamedTuple):
    """Documents of the tokens, and the state before the first token."""

    documents: Tensor | None = None
    """Number of each token's document: [B, S]. A state is not passed from a document to the next one. None means one
    document."""
    state: Tensor | None = None
    """State before the first token, of the first token's document: [B, G, N, R P], or [B, N, D] in a selective scan
    of D channels. None means zeros."""
    is_real: Tensor | None = None
    """Whether each token is real: [B, S]. Padding leaves the state as it is. None means that all tokens are real."""

    def only_real(self, x: Tensor) -> Tensor:
        """Return `x` [B, S, A] with zeros for padding."""
        return x if self.is_real is None else x * self.is_real.unsqueeze(-1)


FROM_START = Place()
"""Place of sequences of one document each, from their first tokens on."""


class Decays(NamedTuple):
    """Decays of one chunk of Q tokens."""

    within: Tensor
    """Decays [B, A, Q, Q] from a token (last dimension) to another one; 0 where the second one does not see the first
    one."""
    reach: Tensor
    """Decays [B, A, Q, 1] from the state before the chunk to each token."""

    @property
    def remaining(self) -> Tensor:
        """Decays [B, A, Q, 1] from each token to the end of the chunk."""
        return self.within[:, :, -1].unsqueeze(-1)

    def whole(self, num_groups: int, head_size: int) -> Tensor:
        """Decay over the whole chunk, for each element of the state: [B, G, 1, R P]."""
        last: Tensor = self.reach[:, :, -1].unflatten(1, (num_groups, -1))
        return last.expand(-1, -1, -1, head_size).flatten(2).unsqueeze(2)

    def mixed(self, scores: Tensor) -> Tensor:
        """Return the scores [B, G, Q, Q] of a group's vectors times the decays of its heads: [B, A, Q, Q]."""
        weights: Tensor = scores.unsqueeze(2) * self.within.unflatten(1, (scores.shape[1], -1))
        return weights.flatten(1, 2)


class Chunks:
    """Sequence that is cut into chunks."""

    def __init__(self, length: int, chunk: int) -> None:
        self._edges = [*range(0, length, chunk), length]
        self.number = len(self._edges) - 1

    def tokens(self, index: int) -> slice:
        """Tokens of a chunk."""
        return slice(self._edges[index], self._edges[index + 1])


class Steps:
    """Step sizes of a sequence, d = softplus(step + bias), and the decays that follow from them.

    `step` is [B, S, A], and `log_rate` and `bias` are [A], at least float32. `limits` are the minimum and the maximum
    of the step size. Padding has the step size 0.
    """

    def __init__(
        self, step: Tensor, log_rate: Tensor, bias: Tensor, place: Place, limits: tuple[float, float] = (0.0, inf)
    ) -> None:
        self._step, self._bias, self._limits, self._place = step, bias, limits, place
        self._raw = F.softplus(step.to(bias.dtype) + bias)
        self.sizes = place.only_real(self._raw.clamp(*limits))
        """Step sizes d: [B, S, A]."""
        self.rates = log_rate.exp()

    def decays(self, own: slice) -> Decays:
        """Return the decays between the tokens `own` of a chunk."""
        logs = -self.rates.unsqueeze(-1) * self.sizes[:, own].transpose(1, 2)  # [B, A, Q]
        length = logs.shape[-1]
        seen = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
        sums = torch.where(seen.tril(-1), logs.unsqueeze(-1), 0.0).cumsum(-2)
        reach = logs.cumsum(-1)
        if self._place.documents is not None:
            numbers = self._place.documents[:, own]
            seen = seen & (numbers.unsqueeze(-1) == numbers.unsqueeze(-2)).unsqueeze(1)
            before = self._place.documents[:, max(own.start - 1, 0)].unsqueeze(-1)
            reach = reach.masked_fill((numbers != before).unsqueeze(1), -inf)
        return Decays(sums.masked_fill(~seen, -inf).exp(), reach.exp().unsqueeze(-1))

    def kept(self, like: Tensor) -> Tensor:
        """Return the decays of a single token, for each element of the state, in the shape of `like` [B, G, 1, R P]."""
        decays = torch.exp(-self.rates * self.sizes).mT  # [B, A, 1]
        return decays.expand(-1, -1, like[0].numel() // decays.shape[1]).reshape(like.shape)

    def gradients(self, logs: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of `step`, `log_rate` and `bias`. `logs` [B, S, A] is the gradient of the logarithms of
        the tokens' decays, and `sizes` [B, S, A] that of the step sizes as factors of something else.
        """
        through_logs = -logs * self.rates
        total = through_logs if sizes is None else through_logs + sizes
        is_inside = (self._raw >= self._limits[0]) & (self._raw <= self._limits[1])
        step = self._place.only_real(total * is_inside * torch.sigmoid(self._step.to(logs.dtype) + self._bias))
        return step.to(self._step.dtype), (through_logs * self.sizes).sum((0, 1)), step.sum((0, 1))


def of_segments(of_sums: Tensor, of_reach: Tensor) -> Tensor:
    """Return the gradient of the logarithms [B, A, Q], from those of the sums over the segments between two tokens
    [B, A, Q, Q], and of the sums over the segments from the start of the chunk [B, A, Q].
    """
    logs = of_reach.flip(-1).cumsum(-1).flip(-1)
    # A segment from token j to token i covers token k if j < k <= i.
    logs[..., 1:] += of_sums.cumsum(-1).tril(-1).sum(-2)[..., :-1]
    return logs


def to_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut [B, G, Q, R P] into heads [B, A, Q, P]."""
    cut: Tensor = x.unflatten(-1, (num_heads // x.shape[1], -1)).transpose(2, 3).flatten(1, 2)
    return cut


def to_groups(x: Tensor, num_groups: int) -> Tensor:
    """Join heads [B, A, Q, P] to groups [B, G, Q, R P]."""
    cut: Tensor = x.unflatten(1, (num_groups, -1)).transpose(2, 3).flatten(3)
    return cut


def state_of_heads(state: Tensor, num_heads: int) -> Tensor:
    """Cut a state [B, G, N, R P] into heads [B, G, R, N, P]."""
    cut: Tensor = state.unflatten(-1, (num_heads // state.shape[1], -1)).transpose(2, 3)
    return cut


def sum_over_heads(x: Tensor, num_groups: int) -> Tensor:
    """Sum [B, A, ...] over the heads of each group: [B, G, ...]."""
    total: Tensor = x.unflatten(1, (num_groups, -1)).sum(2)
    return total
