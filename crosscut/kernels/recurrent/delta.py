r"""Chunked gated delta rule (gated delta net), on one device.

Each head has a state S [N, P]. With the key k and the query q of the head's group, both of length 1, the value v, the
step size d, the decay rate r and the strength b:

    beta_t = m sigmoid(b_t)      e_t = v_t - exp(-r d_t) S_(t-1)^T k_t
    S_t = exp(-r d_t) S_(t-1) + k_t (beta_t e_t)^T        y_t = S_t^T q_t / sqrt(N)

m is 1 or 2, and e is the error of the state's guess of v. In a chunk of Q tokens, the error of a token depends on those
of the tokens before it. All errors E together solve a triangular system:

    (I + M diag(beta)) E = V - reach * (K S)        M = (K K^T) * L below the diagonal
    Y = ((Q K^T) * L) (beta E) + reach * (Q S)        S' = whole * S + K^T (remaining * beta E)

L, `reach`, `remaining` and `whole` are decays (`chunks`). States, decays and the system are at least float32.

Source: Yang et al. 2024 (arXiv 2412.06464), section 3.

Shapes: B batch, S sequence, A heads, P elements of a value, G groups, R = A / G heads of a group, N elements of a query
or a key, Q tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.linalg import solve_triangular

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

_EPSILON = 1e-6
"""Number that is added to the squares of a query's or a key's elements, as in the published code."""


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Sizes of a gated delta rule."""

    value_size: int
    key_size: int
    chunk: int
    """Tokens of a chunk. The number changes the result only by rounding."""
    strongest: float = 1.0
    """Limit m of the strengths after the sigmoid. With 2, the matrix by which a token multiplies the state may have
    negative eigenvalues."""


class DeltaOperands(NamedTuple):
    """Tensors of a gated delta rule."""

    values: Tensor
    """Values of the heads: [B, S, A P]."""
    vectors: Tensor
    """Queries and keys of the groups, of any length: [B, S, G 2 N]. Each group has its query before its key."""
    step: Tensor
    """Step sizes before the bias and the softplus: [B, S, A]."""
    strength: Tensor
    """Strengths b before the sigmoid: [B, S, A]."""
    log_rate: Tensor
    """Logarithm of the decay rate r of each head: [A], at least float32, like the bias."""
    bias: Tensor


def delta_rule(operands: DeltaOperands, shape: DeltaShape, place: Place = FROM_START) -> Tensor:
    """Return the outputs y [B, S, A P].

    For the backward pass, the operands and the errors are saved and, for each chunk, the products of queries and keys
    with keys, and the state before the chunk.
    """
    y: Tensor = run(_Delta, *operands, *place, shape, False, twin=_plain)
    return y


def delta_rule_on(operands: DeltaOperands, shape: DeltaShape, place: Place = FROM_START) -> tuple[Tensor, Tensor]:
    """Return the outputs y [B, S, A P], and the state [B, G, N, R P] after the last token."""
    y, state = run(_Delta, *operands, *place, shape, True, twin=_plain)
    return y, state


def delta_rule_next(operands: DeltaOperands, shape: DeltaShape, place: Place) -> Tensor:
    """Return the outputs y [B, S, A P] of tokens that continue a text. The state of `place`, after the earlier tokens,
    is overwritten by the state after these tokens. Autograd cannot differentiate the result.

    A single token takes the step of the rule, without a system of equations.
    """
    assert place.state is not None
    if operands.values.shape[1] > 1:
        y, after = delta_rule_on(operands, shape, place)
        place.state.copy_(after)
        return y
    whole = _Sequence(operands, shape, place)
    beta, state = whole.beta.mT, place.state  # [B, A, 1], [B, G, N, R P]
    query, key = (whole.normal * whole.scale)[:, 0].unbind(2)  # each [B, G, N]
    state.mul_(whole.steps.kept(state[:, :, :1]))
    errors = operands.values.view(*beta.shape[:2], -1) - (key.unsqueeze(2) @ state).view(*beta.shape[:2], -1)
    state.addcmul_(key.unsqueeze(-1), (beta * errors).view_as(state[:, :, :1]))
    read: Tensor = query.unsqueeze(2) @ state
    return read.view_as(operands.values).to(operands.values.dtype)


class _Chunk(NamedTuple):
    """Tensors of one chunk of Q tokens."""

    values: Tensor
    """Values: [B, A, Q, P]."""
    readers: Tensor
    """Queries of the groups, and below them the keys: [B, G, 2 Q, N]."""
    beta: Tensor
    """Strengths m sigmoid(b): [B, A, Q, 1]."""
    decays: Decays

    @property
    def keys(self) -> Tensor:
        """Keys of the groups: [B, G, Q, N]."""
        return self.readers.chunk(2, 2)[1]

    @property
    def whole(self) -> Tensor:
        """Decay over the whole chunk, for each element of the state: [B, G, 1, R P]."""
        return self.decays.whole(self.readers.shape[1], self.values.shape[-1])

    def mixed(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the tokens (Q K^T) * L and the matrix M, each [B, A, Q, Q], from the products of
        queries and keys with the keys [B, G, 2 Q, Q].
        """
        of_queries, of_keys = scores.chunk(2, 2)
        return self.decays.mixed(of_queries), self.decays.mixed(of_keys).tril(-1)


class _Sequence(Chunks):
    """Sequence of a gated delta rule, cut into chunks."""

    def __init__(self, operands: DeltaOperands, shape: DeltaShape, place: Place) -> None:
        super().__init__(operands.values.shape[1], shape.chunk)
        self.steps = Steps(operands.step, operands.log_rate, operands.bias, place)
        self.sigmoid = torch.sigmoid(operands.strength.to(operands.bias.dtype))
        self.beta = place.only_real(self.sigmoid * shape.strongest)
        self.values = operands.values.unflatten(-1, (-1, shape.value_size)).transpose(1, 2)  # [B, A, S, P]
        wide = operands.vectors.unflatten(-1, (-1, 2, shape.key_size)).to(operands.bias.dtype)  # [B, S, G, 2, N]
        self.root = torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)
        """Inverse lengths of the queries and keys: [B, S, G, 2, 1]."""
        self.normal = wide * self.root
        """Queries and keys of length 1: [B, S, G, 2, N]."""
        self.scale = wide.new_ones(2, 1)
        """Factors of the queries and of the keys: [2, 1]."""
        self.scale[0] = shape.key_size**-0.5
        self.readers = (self.normal * self.scale).to(operands.vectors.dtype).permute(0, 2, 3, 1, 4)  # [B, G, 2, S, N]

    def chunk(self, index: int) -> _Chunk:
        """Return the tensors of a chunk."""
        own = self.tokens(index)
        beta = self.beta[:, own].transpose(1, 2).unsqueeze(-1)
        return _Chunk(self.values[:, :, own], self.readers[:, :, :, own].flatten(2, 3), beta, self.steps.decays(own))


class _Result(NamedTuple):
    y: Tensor
    state: Tensor | None
    """State after the last token, if it was asked for."""
    scores: list[Tensor]
    """Products of the queries and keys of each chunk with its keys."""
    errors: list[Tensor]
    """Errors of each chunk: [B, A, Q, P]."""
    states: list[Tensor | None]
    """State before each chunk."""


def _ruled(operands: DeltaOperands, shape: DeltaShape, place: Place, wants_state: bool) -> _Result:
    """Run the gated delta rule with PyTorch's own operators."""
    whole, dtype = _Sequence(operands, shape, place), operands.values.dtype
    found = _Result(operands.values, place.state, [], [], [])
    state, outputs = place.state, []
    for index in range(whole.number):
        chunk = whole.chunk(index)
        found.scores.append(chunk.readers @ chunk.keys.mT)
        found.states.append(state)
        weights, system = chunk.mixed(found.scores[-1])
        wanted, y = chunk.values.to(system.dtype), None
        if state is not None:
            read = to_heads(chunk.readers @ state.to(dtype), wanted.shape[1])
            y, guess = (each * chunk.decays.reach for each in read.chunk(2, 2))
            wanted = wanted - guess
        errors = solve_triangular(system * chunk.beta.mT, wanted, upper=False, unitriangular=True)
        found.errors.append(errors.to(dtype))
        added = chunk.beta * errors
        seen = weights.to(dtype) @ added.to(dtype)
        outputs.append((seen if y is None else seen + y.to(dtype)).transpose(1, 2).flatten(2))
        if wants_state or index + 1 < whole.number:
            left = to_groups((added * chunk.decays.remaining).to(dtype), chunk.readers.shape[1])
            entered = (chunk.keys.mT @ left).to(system.dtype)
            state = entered if state is None else state * chunk.whole + entered
    return found._replace(y=torch.cat(outputs, 1), state=state if wants_state else None)


def _plain(*arguments: Any) -> Any:
    """Plain twin of the autograd function `_Delta`."""
    *tensors, shape, wants_state = arguments
    found = _ruled(DeltaOperands(*tensors[:6]), shape, Place(*tensors[6:]), wants_state)
    return (found.y, found.state) if wants_state else found.y


class _Delta(Function):
    """Gated delta rule that saves few values. Its backward pass computes the decays again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, shape, wants_state = arguments
        found = _ruled(DeltaOperands(*tensors[:6]), shape, Place(*tensors[6:]), wants_state)
        ctx.shape, ctx.num_chunks = shape, len(found.scores)
        ctx.save_for_backward(*tensors, *found.scores, *found.errors, *found.states)
        return (found.y, found.state) if wants_state else found.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor | None = None) -> Any:
        saved, count = ctx.saved_tensors, ctx.num_chunks
        operands, place = DeltaOperands(*saved[:6]), Place(*saved[6:9])
        kept = list(zip(*(saved[9 + i * count : 9 + (i + 1) * count] for i in range(3)), strict=True))
        whole = _Sequence(operands, ctx.shape, place)
        grad = grad.unflatten(-1, (-1, ctx.shape.value_size)).transpose(1, 2)  # [B, A, S, P]
        found: list[_Gradients] = []
        for index in reversed(range(count)):
            own, grad_state = _gradients(whole.chunk(index), kept[index], grad[:, :, whole.tokens(index)], grad_state)
            found.append(own)
        return *_joined(operands, whole, found[::-1], ctx.shape.strongest), None, grad_state, None, None, None


class _Gradients(NamedTuple):
    """Gradients of one chunk."""

    values: Tensor
    """Gradient of the values: [B, Q, A P]."""
    readers: Tensor
    """Gradient of the queries and keys after the norm: [B, G, 2 Q, N]."""
    beta: Tensor
    """Gradient of the strengths m sigmoid(b): [B, A, Q]."""
    logs: Tensor
    """Gradient of the logarithms of the decays: [B, A, Q]."""


def _gradients(
    chunk: _Chunk, kept: tuple[Tensor, Tensor, Tensor | None], grad: Tensor, grad_state: Tensor | None
) -> tuple[_Gradients, Tensor | None]:
    """Return the gradients of a chunk, and of the state before it. `kept` are the scores, the errors and the state
    before the chunk, `grad` [B, A, Q, P] is the gradient of the outputs, and `grad_state` that of the state after the
    chunk.
    """
    scores, errors, state = kept
    dtype, num_groups = grad.dtype, scores.shape[1]
    weights, system = chunk.mixed(scores)
    added, keys = chunk.beta * errors, chunk.keys
    of_added = (weights.to(dtype).mT @ grad).to(system.dtype)
    if grad_state is not None:
        carried = to_heads(keys @ grad_state.to(dtype), added.shape[1]) * chunk.decays.remaining
        of_added = of_added + carried
    of_errors = solve_triangular((chunk.beta * system).mT, of_added, upper=True, unitriangular=True)
    of_wanted = chunk.beta * of_errors
    of_weights, of_system = grad @ added.to(dtype).mT, -(of_wanted.to(dtype) @ added.to(dtype).mT).tril(-1)
    of_scores = torch.cat([sum_over_heads(x * chunk.decays.within, num_groups) for x in (of_weights, of_system)], 2)
    of_scores = of_scores.to(dtype)
    readers, of_keys = of_scores @ keys, of_scores.mT @ chunk.readers
    of_sums = of_weights * weights + of_system * system  # gradient of the logarithm of L
    of_reach = of_sums.new_zeros(of_sums.shape[:3])
    if grad_state is not None:
        of_sums[:, :, -1] += (carried * added).sum(-1)
        left = to_groups((added * chunk.decays.remaining).to(dtype), num_groups)
        of_keys = of_keys + left @ grad_state.to(dtype).mT
    before = None
    if state is not None:
        of_read, reach, before = _of_state(chunk, state, torch.cat((grad, -of_wanted), 2), grad_state)
        readers, of_reach = readers + of_read, of_reach + reach
    found = _Gradients(
        values=of_wanted.to(dtype).transpose(1, 2).flatten(2),
        readers=readers + F.pad(of_keys, (0, 0, of_keys.shape[2], 0)),
        beta=(of_errors * errors).sum(-1),
        logs=of_segments(of_sums, of_reach),
    )
    return found, before


def _of_state(chunk: _Chunk, state: Tensor, grad: Tensor, grad_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries and keys through the state [B, G, 2 Q, N], of the logarithm of `reach`
    [B, A, Q], and of the state before the chunk. `grad` [B, A, 2 Q, P] is the gradient of what queries and keys read
    from the state, after its decay, and `grad_state` that of the state after the chunk.
    """
    (_, num_groups, _, _), dtype, num_heads = chunk.readers.shape, chunk.readers.dtype, grad.shape[1]
    read = (grad * chunk.decays.reach.repeat(1, 1, 2, 1)).to(dtype)
    of_group = read.unflatten(1, (num_groups, -1)) @ state_of_heads(state.to(dtype), num_heads).mT  # [B, G, R, 2 Q, N]
    reach = (of_group * chunk.readers.unsqueeze(2)).sum(-1).flatten(1, 2).unflatten(-1, (2, -1)).sum(2)
    before = (chunk.readers.mT @ to_groups(read, num_groups)).to(chunk.beta.dtype)
    if grad_state is not None:
        passed = grad_state * chunk.whole
        reach[..., -1] += state_of_heads(passed * state, num_heads).sum((-1, -2)).flatten(1, 2)
        before = before + passed
    return of_group.sum(2), reach.to(before.dtype), before


def _joined(operands: DeltaOperands, whole: _Sequence, found: list[_Gradients], strongest: float) -> tuple[Tensor, ...]:
    """Return the gradients of the operands, from those of the chunks."""
    logs, beta = (
        torch.cat(parts, 2).transpose(1, 2) for parts in zip(*((own.logs, own.beta) for own in found), strict=True)
    )
    step, log_rate, bias = whole.steps.gradients(logs)
    readers = torch.cat([own.readers.unflatten(2, (2, -1)) for own in found], 3).permute(0, 3, 1, 2, 4)
    of_normal = readers * whole.scale  # [B, S, G, 2, N]
    vectors = whole.root * (of_normal - whole.normal * (of_normal * whole.normal).sum(-1, keepdim=True))
    strength = beta * strongest * whole.sigmoid * (1 - whole.sigmoid)
    return (
        torch.cat([own.values for own in found], 1),
        vectors.flatten(2).to(operands.vectors.dtype),
        step,
        strength.to(operands.strength.dtype),
        log_rate,
        bias,
    )
