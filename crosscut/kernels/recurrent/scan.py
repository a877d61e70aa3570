r"""Chunked scan of a state-space mixer (Mamba-2, "SSD"), on one device.

Each head has a state h [N, P]. With the step size d, the decay rate r, the group's vectors b and c, and the skip s:

    d_t = softplus(step_t + bias)    h_t = exp(-r d_t) h_(t-1) + b_t (d_t x_t)^T    y_t = h_t^T c_t + s x_t

The sequence is cut into chunks of Q tokens. Inside a chunk, the outputs are masked products, as in attention, with the
decays between two tokens in the place of the softmax. Between chunks, only the states are passed on:

    y = ((C B^T) * L) (d x) + reach * (C h) + s x          h' = whole * h + B^T (remaining * d x)

L[i, j] is the decay from token j to token i. `reach` is the decay from the state before the chunk to each token,
`remaining` the decay from each token to the end of the chunk, and `whole` the decay over the chunk (`chunks`). States
and decays are at least float32.

Source: Dao and Gu 2024 (arXiv 2405.21060), section 6.

Shapes: B batch, S sequence, A heads, P elements of a head, G groups, R = A / G heads of a group, N elements of the
state, Q tokens of a chunk.
"""

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import run
from crosscut.kernels.recurrent.chunks import (
    FROM_START,
    Chunks,
    Decays,
    Place,
    Steps,
    of_segments,
    state_of_heads,
    sum_over_heads,
    to_groups,
    to_heads,
)


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


def scan_next(operands: Operands, shape: ScanShape, place: Place) -> Tensor:
    """Return the outputs y [B, S, A P] of tokens that continue a text. The state of `place`, after the earlier tokens,
    is overwritten by the state after these tokens. Autograd cannot differentiate the result.

    A single token takes the step of the recurrence, which passes over the state three times.
    """
    assert place.state is not None
    if operands.x.shape[1] > 1:
        y, after = scan_on(operands, shape, place)
        place.state.copy_(after)
        return y
    limits = (shape.least_step, shape.most_step)
    steps = Steps(operands.step, operands.log_rate, operands.bias, place, limits)
    sizes = steps.sizes.mT  # [B, A, 1]
    x = operands.x.view(*sizes.shape[:2], -1).to(sizes.dtype)  # [B, A, P]
    b, c = operands.bc.view(*place.state.shape[:2], 2, -1).to(sizes.dtype).unbind(2)  # each [B, G, N]
    entering = (x * sizes).view_as(place.state[:, :, :1])  # [B, G, 1, R P]
    place.state.mul_(steps.kept(entering)).addcmul_(b.unsqueeze(-1), entering)
    y = (c.unsqueeze(2) @ place.state).view_as(x)
    return y.addcmul_(x, operands.skip.unsqueeze(-1)).view_as(operands.x).to(operands.x.dtype)


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
    decays: Decays

    def mixed(self, scores: Tensor) -> Tensor:
        """Weights of the tokens [B, A, Q, Q], from C B^T [B, G, Q, Q]."""
        return self.decays.mixed(scores).to(self.x.dtype)

    @property
    def whole(self) -> Tensor:
        """Decay over the whole chunk, for each element of the state: [B, G, 1, R P]."""
        return self.decays.whole(self.b.shape[1], self.x.shape[-1])


class _Sequence(Chunks):
    """Sequence of a scan, cut into chunks."""

    def __init__(self, operands: Operands, shape: ScanShape, place: Place) -> None:
        super().__init__(operands.x.shape[1], shape.chunk)
        limits = (shape.least_step, shape.most_step)
        self.steps = Steps(operands.step, operands.log_rate, operands.bias, place, limits)
        self.x = operands.x.unflatten(-1, (-1, shape.head_size)).transpose(1, 2)  # [B, A, S, P]
        self.bc = operands.bc.unflatten(-1, (-1, 2, shape.state_size)).transpose(1, 2)  # [B, G, S, 2, N]

    def chunk(self, index: int) -> _Chunk:
        """Return the tensors of a chunk."""
        own = self.tokens(index)
        x, sizes = self.x[:, :, own], self.steps.sizes[:, own].transpose(1, 2).unsqueeze(-1)
        b, c = self.bc[:, :, own].unbind(3)
        return _Chunk(x, sizes, (x * sizes).to(x.dtype), b, c, self.steps.decays(own))


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
    for index in range(whole.number):
        chunk = whole.chunk(index)
        scores.append(chunk.c @ chunk.b.mT)
        states.append(state)
        y = chunk.mixed(scores[-1]) @ chunk.scaled + chunk.x * skip
        if state is not None:
            reached = to_heads(chunk.c @ state.to(chunk.c.dtype), y.shape[1])
            y = y + (reached * chunk.decays.reach).to(y.dtype)
        outputs.append(y.transpose(1, 2).flatten(2))
        if wants_state or index + 1 < whole.number:
            left = (chunk.scaled * chunk.decays.remaining).to(y.dtype)
            added = (chunk.b.mT @ to_groups(left, chunk.b.shape[1])).to(whole.steps.sizes.dtype)
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
        return *_joined(whole.steps, found[::-1]), None, grad_state, None, None, None


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
    of_scores = sum_over_heads(of_mixed * chunk.decays.within, groups).to(dtype)
    b, c = of_scores.mT @ chunk.c, of_scores @ chunk.b
    of_sums = (of_mixed * mixed).to(chunk.decays.within.dtype)  # gradient of the logarithm of L
    of_reach = of_sums.new_zeros(of_sums.shape[:3])
    before = None
    if grad_state is not None:
        carried = to_heads(chunk.b @ grad_state.to(dtype), num_heads) * chunk.decays.remaining
        of_sums[:, :, -1] += (carried * chunk.scaled).sum(-1)
        scaled = scaled + carried.to(dtype)
        left = to_groups((chunk.scaled * chunk.decays.remaining).to(dtype), groups)
        b = b + left @ grad_state.to(dtype).mT
    if state is not None:
        reached = (grad * chunk.decays.reach).to(dtype)
        of_group = reached.unflatten(1, (groups, -1)) @ state_of_heads(state.to(dtype), num_heads).mT  # [B, G, R, Q, N]
        of_reach += (of_group * chunk.c.unsqueeze(2)).sum(-1).flatten(1, 2)
        c = c + of_group.sum(2)
        before = (chunk.c.mT @ to_groups(reached, groups)).to(chunk.decays.reach.dtype)
        if grad_state is not None:
            passed = grad_state * chunk.whole
            of_reach[..., -1] += state_of_heads(passed * state, num_heads).sum((-1, -2)).flatten(1, 2)
            before = before + passed
    found = _Gradients(
        x=(scaled * chunk.sizes + grad * skip).to(dtype).transpose(1, 2).flatten(2),
        bc=torch.stack((b, c), 3).transpose(1, 2).flatten(2),
        sizes=(scaled * chunk.x).to(chunk.sizes.dtype).sum(-1),
        logs=of_segments(of_sums, of_reach),
        skip=(grad * chunk.x).to(skip.dtype).sum((0, 2, 3)),
    )
    return found, before


def _joined(steps: Steps, found: list[_Gradients]) -> tuple[Tensor, ...]:
    """Return the gradients of the operands, from those of the chunks."""
    logs, sizes = (
        torch.cat(parts, 2).transpose(1, 2) for parts in zip(*((f.logs, f.sizes) for f in found), strict=True)
    )
    step, log_rate, bias = steps.gradients(logs, sizes)
    return (
        torch.cat([own.x for own in found], 1),
        torch.cat([own.bc for own in found], 1),
        step,
        log_rate,
        torch.stack([own.skip for own in found]).sum(0),
        bias,
    )
