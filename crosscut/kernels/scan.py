r"""Chunked scan of a state-space mixer (Mamba-2, "SSD"), on one device.

Each head has a state h [N, P]. With the step size d, the decay rate r, the group's vectors b and c, and the skip s:

    d_t = softplus(step_t + bias)    h_t = exp(-r d_t) h_(t-1) + b_t (d_t x_t)^T    y_t = h_t^T c_t + s x_t

The sequence is cut into chunks of Q tokens. Inside a chunk, the outputs are masked products, as in attention, with the
decays between two tokens in the place of the softmax. Between chunks, only the states are passed on:

    y = ((C B^T) * L) (d x) + reach * (C h) + s x          h' = whole * h + B^T (remaining * d x)

L[i, j] is the decay from token j to token i. `reach` is the decay from the state before the chunk to each token,
`remaining` the decay from each token to the end of the chunk, and `whole` the decay over the chunk. The logarithm of a
decay is the sum of the steps of its own segment, never a difference of two longer sums: a difference would lose digits,
and a document would depend on the documents before it. States and decays are at least float32.

Source: Dao and Gu 2024 (arXiv 2405.21060), section 6.

Shapes: B batch, S sequence, A heads, P elements of a head, G groups, R = A / G heads of a group, N elements of the
state, Q tokens of a chunk.
"""

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import run


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """Sizes and limits of a scan."""

    head_size: int
    state_size: int
    chunk: int
    """Tokens of a chunk. The number changes the result only by rounding."""
    least_step: float = 0.0
    most_step: float = inf
    """Limits of the step size d."""


class Operands(NamedTuple):
    """Tensors of a scan."""

    x: Tensor
    """Inputs of the heads: [B, S, A P]."""
    bc: Tensor
    """Vectors b and c of the groups: [B, S, G 2 N]. Each group has its b before its c."""
    step: Tensor
    """Step sizes before the bias and the softplus: [B, S, A]."""
    log_rate: Tensor
    """Logarithm of the decay rate r of each head: [A], at least float32, like the skip and the bias."""
    skip: Tensor
    bias: Tensor


class Place(NamedTuple):
    """Documents of the tokens, and the state before the first token."""

    documents: Tensor | None = None
    """Number of each token's document: [B, S]. A state is not passed from a document to the next one. None means one
    document."""
    state: Tensor | None = None
    """State [B, G, N, R P] before the first token, of the first token's document. None means zeros."""
    is_real: Tensor | None = None
    """Whether each token is real: [B, S]. Padding leaves the state as it is. None means that all tokens are real."""


FROM_START = Place()
"""Place of sequences of one document each, from their first tokens on."""


def scan(operands: Operands, shape: ScanShape, place: Place = FROM_START) -> Tensor:
    """Return the outputs y [B, S, A P].

    For the backward pass, the operands are saved and, for each chunk, C B^T and the state before the chunk.
    """
    y: Tensor = run(_Scan, *operands, *place, shape, False, twin=_plain)
    return y


def scan_on(operands: Operands, shape: ScanShape, place: Place = FROM_START) -> tuple[Tensor, Tensor]:
    """Return the outputs y [B, S, A P], and the state [B, G, N, R P] after the last token."""
    y, state = run(_Scan, *operands, *place, shape, True, twin=_plain)
    return y, state


class _Chunk(NamedTuple):
    """Tensors of one chunk of Q tokens."""

    x: Tensor
    """Inputs [B, A, Q, P]."""
    sizes: Tensor
    """Step sizes: [B, A, Q, 1]."""
    scaled: Tensor
    """Inputs times step sizes: [B, A, Q, P]."""
    b: Tensor
    c: Tensor
    """Vectors of the groups: [B, G, Q, N]."""
    within: Tensor
    """Decays L [B, A, Q, Q] from a token (last dimension) to another one; 0 where the second one does not see the first
    one."""
    reach: Tensor
    """Decays [B, A, Q, 1] from the state before the chunk to each token."""

    @property
    def remaining(self) -> Tensor:
        """Decays [B, A, Q, 1] from each token to the end of the chunk."""
        return self.within[:, :, -1].unsqueeze(-1)

    @property
    def whole(self) -> Tensor:
        """Decay over the whole chunk, for each element of the state: [B, G, 1, R P]."""
        (batch, groups), head_size = self.b.shape[:2], self.x.shape[-1]
        last = self.reach[:, :, -1].reshape(batch, groups, -1, 1)
        return last.expand(-1, -1, -1, head_size).flatten(2).unsqueeze(2)

    def mixed(self, scores: Tensor) -> Tensor:
        """Weights of the tokens [B, A, Q, Q], from C B^T [B, G, Q, Q]."""
        weights: Tensor = scores.unsqueeze(2) * self.within.unflatten(1, (scores.shape[1], -1))
        return weights.flatten(1, 2).to(self.x.dtype)


class _Sequence:
    """Sequence of a scan, cut into chunks."""

    def __init__(self, operands: Operands, shape: ScanShape, place: Place) -> None:
        self.raw = F.softplus(operands.step.to(operands.bias.dtype) + operands.bias)
        """Step sizes before they are limited: [B, S, A]."""
        self.sizes = self.raw.clamp(shape.least_step, shape.most_step)
        """Step sizes d: [B, S, A]."""
        if place.is_real is not None:
            self.sizes = self.sizes * place.is_real.unsqueeze(-1)
        self.rates = operands.log_rate.exp()
        self.x = operands.x.unflatten(-1, (-1, shape.head_size)).transpose(1, 2)  # [B, A, S, P]
        self.bc = operands.bc.unflatten(-1, (-1, 2, shape.state_size)).transpose(1, 2)  # [B, G, S, 2, N]
        self._documents = place.documents
        self._edges = [*range(0, self.x.shape[2], shape.chunk), self.x.shape[2]]
        self.num_chunks = len(self._edges) - 1

    def tokens(self, index: int) -> slice:
        """Tokens of a chunk."""
        return slice(self._edges[index], self._edges[index + 1])

    def chunk(self, index: int) -> _Chunk:
        """Return the tensors of a chunk."""
        own = self.tokens(index)
        x, sizes = self.x[:, :, own], self.sizes[:, own].transpose(1, 2).unsqueeze(-1)
        b, c = self.bc[:, :, own].unbind(3)
        within, reach = self._decays(-self.rates.unsqueeze(-1) * sizes.squeeze(-1), own)
        return _Chunk(x, sizes, (x * sizes).to(x.dtype), b, c, within, reach.unsqueeze(-1))

    def _decays(self, logs: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        """Return the decays between the tokens of a chunk, and to the tokens, from the logarithms [B, A, Q]."""
        length = logs.shape[-1]
        seen = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
        sums = torch.where(seen.tril(-1), logs.unsqueeze(-1), 0.0).cumsum(-2)
        reach = logs.cumsum(-1)
        if self._documents is not None:
            numbers = self._documents[:, own]
            seen = seen & (numbers.unsqueeze(-1) == numbers.unsqueeze(-2)).unsqueeze(1)
            before = self._documents[:, max(own.start - 1, 0)].unsqueeze(-1)
            reach = reach.masked_fill((numbers != before).unsqueeze(1), -inf)
        return sums.masked_fill(~seen, -inf).exp(), reach.exp()


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut [B, G, Q, R P] into heads [B, A, Q, P]."""
    cut: Tensor = x.unflatten(-1, (num_heads // x.shape[1], -1)).transpose(2, 3).flatten(1, 2)
    return cut


def _groups(x: Tensor, num_groups: int) -> Tensor:
    """Join heads [B, A, Q, P] to groups [B, G, Q, R P]."""
    cut: Tensor = x.unflatten(1, (num_groups, -1)).transpose(2, 3).flatten(3)
    return cut


class _Result(NamedTuple):
    y: Tensor
    state: Tensor | None
    """State after the last token, if it was asked for."""
    scores: list[Tensor]
    """C B^T of each chunk."""
    states: list[Tensor | None]
    """State before each chunk."""


def _scanned(operands: Operands, shape: ScanShape, place: Place, wants_state: bool) -> _Result:
    """Run the scan with PyTorch's own operators."""
    whole = _Sequence(operands, shape, place)
    skip = operands.skip.view(-1, 1, 1).to(operands.x.dtype)
    state, outputs, scores, states = place.state, [], [], []
    for index in range(whole.num_chunks):
        chunk = whole.chunk(index)
        scores.append(chunk.c @ chunk.b.mT)
        states.append(state)
        y = chunk.mixed(scores[-1]) @ chunk.scaled + chunk.x * skip
        if state is not None:
            reached = _heads(chunk.c @ state.to(chunk.c.dtype), y.shape[1])
            y = y + (reached * chunk.reach).to(y.dtype)
        outputs.append(y.transpose(1, 2).flatten(2))
        if wants_state or index + 1 < whole.num_chunks:
            left = (chunk.scaled * chunk.remaining).to(y.dtype)
            added = (chunk.b.mT @ _groups(left, chunk.b.shape[1])).to(whole.sizes.dtype)
            state = added if state is None else state * chunk.whole + added
    return _Result(torch.cat(outputs, 1), state if wants_state else None, scores, states)


def _plain(*arguments: Any) -> Any:
    """Plain twin of the autograd function `_Scan`."""
    *tensors, shape, wants_state = arguments
    found = _scanned(Operands(*tensors[:6]), shape, Place(*tensors[6:]), wants_state)
    return (found.y, found.state) if wants_state else found.y


class _Scan(Function):
    """Scan that saves few values. Its backward pass computes the decays again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, shape, wants_state = arguments
        found = _scanned(Operands(*tensors[:6]), shape, Place(*tensors[6:]), wants_state)
        ctx.shape, ctx.num_chunks = shape, len(found.scores)
        ctx.save_for_backward(*tensors, *found.scores, *found.states)
        return (found.y, found.state) if wants_state else found.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor | None = None) -> Any:
        saved, count = ctx.saved_tensors, ctx.num_chunks
        operands, place = Operands(*saved[:6]), Place(*saved[6:9])
        scores, states = saved[9 : 9 + count], saved[9 + count :]
        whole = _Sequence(operands, ctx.shape, place)
        grad = grad.unflatten(-1, (-1, ctx.shape.head_size)).transpose(1, 2)  # [B, A, S, P]
        skip = operands.skip.view(-1, 1, 1)
        found: list[_Gradients] = []
        for index in reversed(range(count)):
            chunk, of_y = whole.chunk(index), grad[:, :, whole.tokens(index)]
            own, grad_state = _gradients(chunk, (scores[index], states[index]), of_y, skip, grad_state)
            found.append(own)
        return *_joined(operands, whole, found[::-1], ctx.shape, place.is_real), None, grad_state, None, None, None


class _Gradients(NamedTuple):
    """Gradients of one chunk."""

    x: Tensor
    """Gradient of the inputs: [B, Q, A P]."""
    bc: Tensor
    """Gradient of the groups' vectors: [B, Q, G 2 N]."""
    sizes: Tensor
    """Gradient of the step sizes as factors of the inputs: [B, A, Q]."""
    logs: Tensor
    """Gradient of the logarithms of the decays: [B, A, Q]."""
    skip: Tensor
    """Gradient of the skip: [A]."""


def _gradients(
    chunk: _Chunk, kept: tuple[Tensor, Tensor | None], grad: Tensor, skip: Tensor, grad_state: Tensor | None
) -> tuple[_Gradients, Tensor | None]:
    """Return the gradients of a chunk, and of the state before it. `kept` are C B^T and the state before the chunk,
    `grad` [B, A, Q, P] is the gradient of the outputs, and `grad_state` that of the state after the chunk.
    """
    scores, state = kept
    num_heads, (groups, dtype) = chunk.x.shape[1], (chunk.b.shape[1], chunk.x.dtype)
    mixed = chunk.mixed(scores)
    of_mixed = grad @ chunk.scaled.mT
    scaled = mixed.mT @ grad
    of_scores = (of_mixed * chunk.within).unflatten(1, (groups, -1)).sum(2).to(dtype)
    b, c = of_scores.mT @ chunk.c, of_scores @ chunk.b
    of_sums = (of_mixed * mixed).to(chunk.within.dtype)  # gradient of the logarithm of L
    of_reach = of_sums.new_zeros(of_sums.shape[:3])
    before = None
    if grad_state is not None:
        carried = _heads(chunk.b @ grad_state.to(dtype), num_heads) * chunk.remaining
        of_sums[:, :, -1] += (carried * chunk.scaled).sum(-1)
        scaled = scaled + carried.to(dtype)
        left = _groups((chunk.scaled * chunk.remaining).to(dtype), groups)
        b = b + left @ grad_state.to(dtype).mT
    if state is not None:
        reached = (grad * chunk.reach).to(dtype)
        of_group = reached.unflatten(1, (groups, -1)) @ _of_heads(state.to(dtype), num_heads).mT  # [B, G, R, Q, N]
        of_reach += (of_group * chunk.c.unsqueeze(2)).sum(-1).flatten(1, 2)
        c = c + of_group.sum(2)
        before = (chunk.c.mT @ _groups(reached, groups)).to(chunk.reach.dtype)
        if grad_state is not None:
            passed = grad_state * chunk.whole
            of_reach[..., -1] += _of_heads(passed * state, num_heads).sum((-1, -2)).flatten(1, 2)
            before = before + passed
    found = _Gradients(
        x=(scaled * chunk.sizes + grad * skip).to(dtype).transpose(1, 2).flatten(2),
        bc=torch.stack((b, c), 3).transpose(1, 2).flatten(2),
        sizes=(scaled * chunk.x).to(chunk.sizes.dtype).sum(-1),
        logs=_of_segments(of_sums, of_reach),
        skip=(grad * chunk.x).to(skip.dtype).sum((0, 2, 3)),
    )
    return found, before


def _of_heads(state: Tensor, num_heads: int) -> Tensor:
    """Cut a state [B, G, N, R P] into heads [B, G, R, N, P]."""
    cut: Tensor = state.unflatten(-1, (num_heads // state.shape[1], -1)).transpose(2, 3)
    return cut


def _of_segments(of_sums: Tensor, of_reach: Tensor) -> Tensor:
    """Return the gradient of the logarithms [B, A, Q], from those of the sums over the segments between two tokens
    [B, A, Q, Q], and of the sums over the segments from the start of the chunk [B, A, Q].
    """
    logs = of_reach.flip(-1).cumsum(-1).flip(-1)
    # A segment from token j to token i covers token k if j < k <= i.
    logs[..., 1:] += of_sums.cumsum(-1).tril(-1).sum(-2)[..., :-1]
    return logs


def _joined(
    operands: Operands, whole: _Sequence, found: list[_Gradients], shape: ScanShape, is_real: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of the operands, from those of the chunks."""
    sizes, logs = (
        torch.cat(parts, 2).transpose(1, 2) for parts in zip(*((f.sizes, f.logs) for f in found), strict=True)
    )
    is_inside = (whole.raw >= shape.least_step) & (whole.raw <= shape.most_step)
    if is_real is not None:
        is_inside = is_inside & is_real.unsqueeze(-1)
    slope = torch.sigmoid(operands.step.to(logs.dtype) + operands.bias)
    step = (sizes - logs * whole.rates) * is_inside * slope
    return (
        torch.cat([own.x for own in found], 1),
        torch.cat([own.bc for own in found], 1),
        step.to(operands.step.dtype),
        (logs * -whole.rates * whole.sizes).sum((0, 1)),
        torch.stack([own.skip for own in found]).sum(0),
        step.sum((0, 1)),
    )
