"""The chunked scan against the recurrence, token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.scan import Operands, ScanShape, scan, scan_next, scan_on
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


def recurrence(operands: Operands, shape: ScanShape, place: Place) -> tuple[Tensor, Tensor]:
    """Plain twin of `scan_on`: the state of each head, token by token."""
    x = operands.x.unflatten(-1, (-1, shape.head_size))
    bc = operands.bc.unflatten(-1, (-1, 2, shape.state_size))
    heads, groups = x.shape[2], bc.shape[2]
    b, c = (each.repeat_interleave(heads // groups, 2) for each in bc.unbind(-2))  # [B, S, A, N]
    sizes = F.softplus(operands.step + operands.bias).clamp(shape.least_step, shape.most_step)
    if place.is_real is not None:
        sizes = sizes * place.is_real.unsqueeze(-1)
    state = x.new_zeros(len(x), heads, shape.state_size, shape.head_size)
    if place.state is not None:
        state = states_of_heads(place.state)
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(-operands.log_rate.exp() * sizes[:, t])
        if place.documents is not None and t:
            decay = decay * (place.documents[:, t] == place.documents[:, t - 1]).unsqueeze(-1)
        added = b[:, t].unsqueeze(-1) * (sizes[:, t].unsqueeze(-1) * x[:, t]).unsqueeze(-2)
        state = state * decay[..., None, None] + added
        outputs.append((c[:, t].unsqueeze(-2) @ state).squeeze(-2) + operands.skip.unsqueeze(-1) * x[:, t])
    grouped = state.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)
    return torch.stack(outputs, 1).flatten(2), grouped


def operands_of(length: int, dtype: torch.dtype = torch.float64) -> Operands:
    torch.manual_seed(3)
    shapes = ((BATCH, length, HEADS * HEAD), (BATCH, length, GROUPS * 2 * STATE), (BATCH, length, HEADS))
    drawn = [torch.randn(shape, dtype=torch.float64) for shape in (*shapes, *[(HEADS,)] * 3)]
    return Operands(*(each.to(dtype).requires_grad_() for each in drawn))


@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("limits", [{}, {"least_step": 0.3, "most_step": 1.1}], ids=str)
def test_chunks_equal_the_recurrence(length: int, given: dict[str, bool], limits: dict[str, float]) -> None:
    operands, place = operands_of(length), place_of(length, **given)
    shape = ScanShape(head_size=HEAD, state_size=STATE, chunk=8, **limits)
    ours, plain = scan_on(operands, shape, place), recurrence(operands, shape, place)
    pairs = zip(gradients(ours, operands, place), gradients(plain, operands, place), strict=True)
    for mine, other in (*zip(ours, plain, strict=True), *pairs):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scan(operands, shape, place), ours[0], rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, 11])
@torch.no_grad()
def test_next_tokens_change_the_state_as_the_recurrence_does(length: int) -> None:
    operands, place = operands_of(length), next_place(length)
    shape = ScanShape(head_size=HEAD, state_size=STATE, chunk=8, least_step=0.3, most_step=1.1)
    y, state = recurrence(operands, shape, place)
    torch.testing.assert_close(scan_next(operands, shape, place), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(place.state, state, rtol=1e-12, atol=1e-12)


def test_the_twin_that_a_compiler_traces_has_the_same_values_and_gradients() -> None:
    operands, place = operands_of(11), place_of(11, documents=True, state=True)
    shape = ScanShape(head_size=HEAD, state_size=STATE, chunk=8)
    traced = torch.compile(scan_on, backend="eager", fullgraph=True)(operands, shape, place)
    ours = scan_on(operands, shape, place)
    pairs = zip(gradients(traced, operands, place), gradients(ours, operands, place), strict=True)
    for mine, other in (*zip(traced, ours, strict=True), *pairs):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        assert mine.grad_fn is None or "Scan" not in mine.grad_fn.name()


def test_sequences_without_a_state_have_the_same_gradients() -> None:
    operands, place = operands_of(21), place_of(21, documents=True)
    shape = ScanShape(head_size=HEAD, state_size=STATE, chunk=8)
    ours = gradients([scan(operands, shape, place)], operands, place)
    plain = gradients(recurrence(operands, shape, place)[:1], operands, place)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def narrow_error(dtype: torch.dtype, chunk: int) -> float:
    """Largest error of a sequence of 512 tokens in narrow numbers, relative to the largest output."""
    torch.manual_seed(7)
    length, groups = 512, 2
    drawn = [torch.randn(1, length, width) for width in (HEADS * HEAD, groups * 2 * STATE)]
    step = torch.empty(1, length, HEADS).uniform_(0.1, 3.0).expm1().log()  # inverse of the softplus
    dynamics = (torch.zeros(HEADS), torch.ones(HEADS), torch.zeros(HEADS))
    narrow = Operands(*(each.to(dtype) for each in (*drawn, step)), *dynamics)
    wide = Operands(*(each.double() for each in narrow))
    exact, _ = recurrence(wide, ScanShape(head_size=HEAD, state_size=STATE, chunk=1), Place())
    found = scan(narrow, ScanShape(head_size=HEAD, state_size=STATE, chunk=chunk))
    assert found.dtype is dtype
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_long_chunks_lose_no_digits(chunk: int) -> None:
    assert narrow_error(torch.float32, chunk) < 3e-7
    assert narrow_error(torch.bfloat16, chunk) < 8e-3


def test_states_and_decays_of_narrow_numbers_are_float32() -> None:
    operands = Operands(*(each.detach().bfloat16() for each in operands_of(21)[:3]), *(torch.zeros(HEADS),) * 3)
    y, state = scan_on(operands, ScanShape(head_size=HEAD, state_size=STATE, chunk=8))
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
