"""The chunked gated delta rule against the rule, token by token."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.delta import (
    DeltaOperands,
    DeltaShape,
    _plain,
    delta_rule,
    delta_rule_next,
    delta_rule_on,
)
from tests.kernels.recurrences import (
    BATCH,
    GIVEN,
    GROUPS,
    HEAD,
    HEADS,
    STATE,
    gradients,
    next_place,
    place_of,
    states_of_heads,
)

SHAPE = DeltaShape(value_size=HEAD, key_size=STATE, chunk=8)
STRONG = replace(SHAPE, strongest=2.0)


def recurrence(operands: DeltaOperands, place: Place, strongest: float = 1.0) -> tuple[Tensor, Tensor]:
    """Plain twin of `delta_rule_on`: the state of each head, token by token."""
    values = operands.values.unflatten(-1, (-1, HEAD))
    vectors = operands.vectors.unflatten(-1, (-1, 2, STATE))
    normal = vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k = (each.repeat_interleave(values.shape[2] // vectors.shape[2], 2) for each in normal.unbind(-2))
    is_real = torch.ones_like(operands.step) if place.is_real is None else place.is_real.unsqueeze(-1)
    keep = torch.exp(-operands.log_rate.exp() * F.softplus(operands.step + operands.bias) * is_real)
    beta = strongest * torch.sigmoid(operands.strength) * is_real
    state = values.new_zeros(*values.shape[::2], STATE, HEAD)
    if place.state is not None:
        state = states_of_heads(place.state)
    outputs = []
    for t in range(values.shape[1]):
        decay = keep[:, t]
        if place.documents is not None and t:
            decay = decay * (place.documents[:, t] == place.documents[:, t - 1]).unsqueeze(-1)
        state = state * decay[..., None, None]
        error = values[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * error).unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) / STATE**0.5)
    grouped = state.unflatten(1, (vectors.shape[2], -1)).transpose(2, 3).flatten(3)
    return torch.stack(outputs, 1).flatten(2), grouped


def operands_of(length: int) -> DeltaOperands:
    torch.manual_seed(3)
    widths = (HEADS * HEAD, GROUPS * 2 * STATE, HEADS, HEADS)
    drawn = [torch.randn(BATCH, length, width, dtype=torch.float64) for width in widths]
    return DeltaOperands(*(each.requires_grad_() for each in (*drawn, *torch.randn(2, HEADS, dtype=torch.float64))))


def traced(operands: DeltaOperands, shape: DeltaShape, place: Place) -> tuple[Tensor, Tensor]:
    """The rule as a compiler reads it."""
    y, state = _plain(*operands, *place, shape, True)
    return y, state


@pytest.mark.parametrize("shape", [SHAPE, STRONG], ids=str)
@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_chunks_equal_the_recurrence(length: int, given: dict[str, bool], shape: DeltaShape) -> None:
    operands, place = operands_of(length), place_of(length, **given)
    plain = recurrence(operands, place, shape.strongest)
    by_steps = [*plain, *gradients(plain, operands, place)]
    for run in (delta_rule_on, traced):
        ours = run(operands, shape, place)
        found = [*ours, *(() if "real" in given else gradients(ours, operands, place))]
        for mine, other in zip(found, by_steps[: len(found)], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    ours = delta_rule_on(operands, shape, place)
    torch.testing.assert_close(delta_rule(operands, shape, place), ours[0], rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, 11])
@torch.no_grad()
def test_next_tokens_change_the_state_as_the_rule_does(length: int) -> None:
    operands, place = operands_of(length), next_place(length)
    y, state = recurrence(operands, place)
    torch.testing.assert_close(delta_rule_next(operands, SHAPE, place), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(place.state, state, rtol=1e-12, atol=1e-12)


def test_sequences_without_a_state_have_the_same_gradients() -> None:
    operands, place = operands_of(21), place_of(21, documents=True)
    ours = gradients([delta_rule(operands, SHAPE, place)], operands, place)
    plain = gradients(recurrence(operands, place)[:1], operands, place)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def narrow_error(dtype: torch.dtype, chunk: int, sharpness: float) -> float:
    """Largest error of a sequence of 256 tokens in narrow numbers, relative to the largest output. A large `sharpness`
    makes the keys alike, so that a token overwrites what the tokens before it wrote.
    """
    torch.manual_seed(7)
    values, strength, step = torch.randn(1, 256, HEADS * HEAD), torch.randn(1, 256, HEADS), torch.randn(1, 256, HEADS)
    vectors = torch.randn(1, 256, GROUPS * 2 * STATE) + sharpness
    dynamics = (torch.full((HEADS,), -3.0), torch.zeros(HEADS))
    narrow = DeltaOperands(*(each.to(dtype) for each in (values, vectors, step, strength)), *dynamics)
    exact, _ = recurrence(DeltaOperands(*(each.double() for each in narrow)), Place())
    found = delta_rule(narrow, DeltaShape(value_size=HEAD, key_size=STATE, chunk=chunk))
    assert found.dtype is dtype
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("sharpness", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [16, 64])
def test_long_chunks_lose_no_digits(chunk: int, sharpness: float) -> None:
    assert narrow_error(torch.float32, chunk, sharpness) < 2e-6
    assert narrow_error(torch.bfloat16, chunk, sharpness) < 2e-2


def test_states_of_narrow_numbers_are_float32() -> None:
    narrow = (each.detach().bfloat16() for each in operands_of(21)[:4])
    y, state = delta_rule_on(DeltaOperands(*narrow, *(torch.zeros(HEADS),) * 2), SHAPE)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
