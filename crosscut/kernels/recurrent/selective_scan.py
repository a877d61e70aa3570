r"""Selective scan of a state-space mixer (Mamba-1, "S6"), on one device.

Each channel has a state h of N elements. With the step size d, the decay rates r of the channel's elements, the vectors
b and c, which all channels share, and the skip s:

    d_t = softplus(step_t + bias)        h_t = exp(-r d_t) * h_(t-1) + d_t x_t b_t        y_t = c_t . h_t + s x_t

The sequence is cut into chunks. The decays, the terms that enter the states, and the outputs are computed for all
tokens of a chunk at once, and one operation per token updates the states. No decay is divided by another one, and no
sum is subtracted from another one, so long sequences lose no digits. At the first token of a document, the decay is 0.
States and decays are at least float32.

Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.

Shapes: B batch, S sequence, D channels, N elements of the state of a channel, Q tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.kernels.functions import run
from crosscut.kernels.recurrent.chunks import FROM_START, Chunks, Place


class Operands(NamedTuple):
    """Tensors of a selective scan."""

    x: Tensor
    """Inputs: [B, S, D]."""
    step: Tensor
    """Step sizes before the bias and the softplus: [B, S, D]."""
    bc: Tensor
    """Vectors b, then c: [B, S, 2 N]."""
    log_rate: Tensor
    """Logarithms of the decay rates r: [D, N], at least float32, like the skip and the bias."""
    skip: Tensor
    bias: Tensor
    """Skip and bias of each channel: [D]."""


def selective_scan(operands: Operands, chunk: int, place: Place = FROM_START) -> Tensor:
    """Return the outputs y [B, S, D]. `chunk` is the number of tokens of a chunk. It changes the result only by
    rounding.

    For the backward pass, the operands are saved and, for each chunk, the state before the chunk.
    """
    y: Tensor = run(_Scan, *operands, *place, chunk, False, twin=_plain)
    return y


def selective_scan_on(operands: Operands, chunk: int, place: Place = FROM_START) -> tuple[Tensor, Tensor]:
    """Return the outputs y [B, S, D], and the state [B, N, D] after the last token."""
    y, state = run(_Scan, *operands, *place, chunk, True, twin=_plain)
    return y, state


def selective_scan_next(operands: Operands, chunk: int, place: Place) -> Tensor:
    """Return the outputs y [B, S, D] of tokens that continue a text. The state of `place`, after the earlier tokens, is
    overwritten by the state after these tokens. Autograd cannot differentiate the result.

    A single token takes the step of the recurrence in the memory of the state.
    """
    assert place.state is not None
    if operands.x.shape[1] > 1:
        y, after = selective_scan_on(operands, chunk, place)
        place.state.copy_(after)
        return y
    whole = _Sequence(operands, chunk, place)
    own = whole.chunk(0)
    place.state.mul_(whole.decays(own, 0)[:, 0]).addcmul_(own.b.mT, own.scaled)
    return torch.addcmul(own.c @ place.state, own.x, operands.skip).to(operands.x.dtype)


class _Chunk(NamedTuple):
    """Tensors of one chunk, at least float32."""

    raw: Tensor
    """Step sizes before the softplus: [B, Q, D]."""
    sizes: Tensor
    """Step sizes d: [B, Q, D]."""
    x: Tensor
    """Inputs: [B, Q, D]."""
    b: Tensor
    c: Tensor
    """Vectors of the tokens: [B, Q, N]."""

    @property
    def scaled(self) -> Tensor:
        """Inputs times step sizes: [B, Q, D]."""
        return self.sizes * self.x


class _Sequence(Chunks):
    """Sequence of a scan, cut into chunks. The chunks use the same memory for their tensors [B, Q, N, D], one after the
    other. Fresh memory for each chunk would take longer than the arithmetic.
    """

    def __init__(self, operands: Operands, chunk: int, place: Place) -> None:
        super().__init__(operands.x.shape[1], chunk)
        self.operands, self.place = operands, place
        self.rates = -operands.log_rate.exp().mT.contiguous()  # [N, D]
        self._longest = min(chunk, operands.x.shape[1])
        self._buffers: list[Tensor] = []
        self._starts: Tensor | None = None
        if (numbers := place.documents) is not None:
            self._starts = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0))[..., None, None]

    def chunk(self, index: int) -> _Chunk:
        """Return the tensors of a chunk."""
        own, wide = self.tokens(index), self.rates.dtype
        raw = self.operands.step[:, own].to(wide) + self.operands.bias
        sizes = F.softplus(raw)
        if self.place.is_real is not None:
            sizes = sizes * self.place.is_real[:, own].unsqueeze(-1)
        b, c = self.operands.bc[:, own].to(wide).chunk(2, -1)
        return _Chunk(raw, sizes, self.operands.x[:, own].to(wide), b, c)

    def buffer(self, number: int, length: int) -> Tensor:
        """Return memory for a tensor [B, Q, N, D] of a chunk of `length` tokens. It holds the values of an earlier
        chunk.
        """
        batch = len(self.operands.x)
        while len(self._buffers) <= number:
            self._buffers.append(self.rates.new_empty(batch * self._longest * self.rates.numel()))
        shape = (batch, length, *self.rates.shape)
        return self._buffers[number][: batch * length * self.rates.numel()].view(shape)

    def decays(self, chunk: _Chunk, index: int, out: Tensor | None = None) -> Tensor:
        """Return the decay of each element of the state before each token: [B, Q, N, D]."""
        logs = torch.mul(chunk.sizes.unsqueeze(2), self.rates, out=out)
        decays = logs.exp() if out is None else logs.exp_()
        if self._starts is None:
            return decays
        starts = self._starts[:, self.tokens(index)]
        return decays.masked_fill(starts, 0.0) if out is None else decays.masked_fill_(starts, 0.0)

    def states(self, chunk: _Chunk, index: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the decays and the states of a chunk, both [B, Q, N, D], in the first two buffers. `before` is the
        state before the chunk.
        """
        length = chunk.sizes.shape[1]
        decays = self.decays(chunk, index, self.buffer(0, length))
        states = torch.mul(chunk.scaled.unsqueeze(2), chunk.b.unsqueeze(3), out=self.buffer(1, length))
        for decay, state in zip(decays.unbind(1), states.unbind(1), strict=True):
            if before is not None:
                state.addcmul_(decay, before)
            before = state
        return decays, states


def _contracted(vectors: Tensor, states: Tensor) -> Tensor:
    """Sum over the elements of the states: [B, Q, N] and [B, Q, N, D] to [B, Q, D]."""
    return (vectors.unsqueeze(2) @ states).squeeze(2)


def _scanned(operands: Operands, place: Place, chunk: int, keep: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the state after the last token. The state before each chunk is added to `keep`."""
    whole = _Sequence(operands, chunk, place)
    y, state = torch.empty_like(operands.x), place.state
    for index in range(whole.number):
        keep.append(state)
        own = whole.chunk(index)
        _, states = whole.states(own, index, state)
        y[:, whole.tokens(index)] = _contracted(own.c, states) + own.x * operands.skip
        state = states[:, -1].clone()
    assert state is not None
    return y, state


def _plain(*arguments: Any) -> Any:
    """Plain twin of the autograd function `_Scan`, for compilers: the states of a chunk are log2 Q sums of pairs."""
    *tensors, chunk, wants_state = arguments
    operands, place = Operands(*tensors[:6]), Place(*tensors[6:])
    whole, state, outputs = _Sequence(operands, chunk, place), place.state, []
    for index in range(whole.number):
        own = whole.chunk(index)
        states, decays = own.scaled.unsqueeze(2) * own.b.unsqueeze(3), whole.decays(own, index)
        if state is not None:
            states = torch.cat((states[:, :1] + decays[:, :1] * state.unsqueeze(1), states[:, 1:]), 1)
        back = 1
        while back < states.shape[1]:  # each state is the sum over the last `back` tokens, and becomes that over twice
            states = torch.cat((states[:, :back], states[:, back:] + decays[:, back:] * states[:, :-back]), 1)
            decays = torch.cat((decays[:, :back], decays[:, back:] * decays[:, :-back]), 1)
            back *= 2
        outputs.append((_contracted(own.c, states) + own.x * operands.skip).to(operands.x.dtype))
        state = states[:, -1]
    y = torch.cat(outputs, 1)
    return (y, state) if wants_state else y


class _Scan(Function):
    """Scan that saves few values. Its backward pass computes the decays and the states of a chunk again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, ctx.chunk_size, wants_state = arguments
        before: list[Tensor | None] = []
        y, state = _scanned(Operands(*tensors[:6]), Place(*tensors[6:]), ctx.chunk_size, before)
        ctx.save_for_backward(*tensors, *before)
        return (y, state) if wants_state else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor | None = None) -> Any:
        saved = ctx.saved_tensors
        operands, place, before = Operands(*saved[:6]), Place(*saved[6:9]), saved[9:]
        whole = _Sequence(operands, ctx.chunk_size, place)
        sums = _Sums.of(operands)
        for index in reversed(range(whole.number)):
            grad_state = sums.add(whole, index, before[index], grad, grad_state)
        log_rate = (sums.rates * whole.rates).mT
        of_state = None if place.state is None else grad_state
        return sums.x, sums.step, sums.bc, log_rate, sums.skip, sums.bias, None, of_state, None, None, None


class _Sums(NamedTuple):
    """Gradients of the operands, to which each chunk adds its part."""

    x: Tensor
    step: Tensor
    bc: Tensor
    rates: Tensor
    """Gradient of the negative decay rates: [N, D]."""
    skip: Tensor
    bias: Tensor

    @classmethod
    def of(cls, operands: Operands) -> "_Sums":
        """Make memory for the gradients."""
        x, step, bc = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in operands[:3])
        rates = torch.zeros_like(operands.log_rate.mT, memory_format=torch.contiguous_format)
        return cls(x, step, bc, rates, torch.zeros_like(operands.skip), torch.zeros_like(operands.bias))

    def add(
        self, whole: _Sequence, index: int, before: Tensor | None, grad: Tensor, grad_state: Tensor | None
    ) -> Tensor:
        """Add the gradients of a chunk, and return the gradient of the state before it. `grad` [B, S, D] is the
        gradient of all outputs, and `grad_state` that of the state after the chunk.
        """
        chunk, own = whole.chunk(index), whole.tokens(index)
        decays, states = whole.states(chunk, index, before)
        of_y, length = grad[:, own].to(decays.dtype), chunk.sizes.shape[1]
        of_states = torch.mul(of_y.unsqueeze(2), chunk.c.unsqueeze(3), out=whole.buffer(2, length))
        if grad_state is not None:
            of_states[:, -1] += grad_state
        later, decay = of_states.unbind(1), decays.unbind(1)
        for t in reversed(range(length - 1)):
            later[t].addcmul_(decay[t + 1], later[t + 1])
        of_before = decay[0] * later[0]
        of_c = (of_y.unsqueeze(2) @ states.mT).squeeze(2)
        of_scaled = _contracted(chunk.b, of_states)
        of_logs = decays.mul_(of_states)
        of_logs[:, 1:].mul_(states[:, :-1])
        of_logs[:, 0].mul_(0.0 if before is None else before)
        of_b = of_states.mul_(chunk.scaled.unsqueeze(2)).sum(-1)
        of_sizes = torch.mul(of_logs, whole.rates, out=states).sum(2)
        self.rates.add_(of_logs.mul_(chunk.sizes.unsqueeze(2)).sum((0, 1)))
        of_raw = (of_scaled * chunk.x + of_sizes) * torch.sigmoid(chunk.raw)
        if whole.place.is_real is not None:
            of_raw *= whole.place.is_real[:, own].unsqueeze(-1)
        self.x[:, own] = of_scaled * chunk.sizes + of_y * whole.operands.skip
        self.step[:, own] = of_raw
        self.bc[:, own] = torch.cat((of_b, of_c), -1)
        self.skip.add_((of_y * chunk.x).sum((0, 1)))
        self.bias.add_(of_raw.sum((0, 1)))
        return of_before
