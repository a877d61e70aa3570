"""The selective scan against the recurrence, token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.kernels.recurrent.chunks import FROM_START, Place
from crosscut.kernels.recurrent.selective_scan import (
    Operands,
    _plain,
    selective_scan,
    selective_scan_next,
    selective_scan_on,
)

BATCH, CHANNELS, STATE = 2, 6, 5


def recurrence(operands: Operands, place: Place = FROM_START) -> tuple[Tensor, Tensor]:
    """Plain twin of `selective_scan_on`: the state of each channel, token by token."""
    x, step, bc, log_rate, skip, bias = operands
    b, c = bc.chunk(2, -1)
    sizes = F.softplus(step + bias)
    if place.is_real is not None:
        sizes = sizes * place.is_real.unsqueeze(-1)
    state = x.new_zeros(len(x), *log_rate.shape) if place.state is None else place.state.mT
    outputs = []
    for t in range(x.shape[1]):
        if place.documents is not None and t:
            state = state * (place.documents[:, t] == place.documents[:, t - 1])[:, None, None]
        added = (sizes[:, t] * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
        state = state * torch.exp(-log_rate.exp() * sizes[:, t].unsqueeze(-1)) + added
        outputs.append((state * c[:, t].unsqueeze(1)).sum(-1) + skip * x[:, t])
    return torch.stack(outputs, 1), state.mT.contiguous()


def operands_of(length: int) -> Operands:
    torch.manual_seed(3)
    rows, channels = (BATCH, length), (CHANNELS,)
    shapes = ((*rows, CHANNELS), (*rows, CHANNELS), (*rows, 2 * STATE), (*channels, STATE), channels, channels)
    return Operands(*(torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes))


def place_of(length: int, *, documents: bool = False, state: bool = False, real: bool = False) -> Place:
    starts = torch.rand(BATCH, length) < 0.2
    first = torch.randn(BATCH, STATE, CHANNELS, dtype=torch.float64)
    return Place(
        starts.cumsum(1) if documents else None,
        first.requires_grad_() if state else None,
        torch.arange(length) < torch.tensor([[length - 3], [0]]) if real else None,
    )


def gradients(outputs: tuple[Tensor, ...], operands: Operands, place: Place) -> list[Tensor]:
    torch.manual_seed(5)
    loss = sum((each * torch.randn_like(each)).sum() for each in outputs)
    wanted = [*operands, *(() if place.state is None else (place.state,))]
    return list(torch.autograd.grad(loss, wanted, materialize_grads=True))


@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize(
    "given", [{}, {"documents": True}, {"state": True}, {"documents": True, "state": True}, {"real": True}], ids=str
)
def test_chunks_equal_the_recurrence(length: int, given: dict[str, bool]) -> None:
    operands, place = operands_of(length), place_of(length, **given)
    plain = recurrence(operands, place)
    wanted = [*plain, *gradients(plain, operands, place)]
    for ours in (selective_scan_on(operands, 8, place), _plain(*operands, *place, 8, True)):
        found = [*ours, *gradients(ours, operands, place)]
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(selective_scan(operands, 8, place), plain[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 11])
@torch.no_grad()
def test_next_tokens_change_the_state_as_the_recurrence_does(length: int) -> None:
    operands, place = operands_of(length), place_of(length, state=True)
    place = place._replace(is_real=torch.arange(length) < torch.tensor([[length], [length // 2]]))
    y, state = recurrence(operands, place)
    torch.testing.assert_close(selective_scan_next(operands, 8, place), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(place.state, state, rtol=1e-12, atol=1e-12)


def test_sequences_without_a_state_have_the_same_gradients() -> None:
    operands, place = operands_of(21), place_of(21, documents=True)
    ours = gradients((selective_scan(operands, 8, place),), operands, place)
    plain = gradients(recurrence(operands, place)[:1], operands, place)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_document_does_not_depend_on_its_neighbours() -> None:
    operands = Operands(*(each.detach() for each in operands_of(21)))
    documents = (torch.arange(21) >= 11).long().expand(BATCH, -1)
    alone = Operands(*(each[:, 11:] for each in operands[:3]), *operands[3:])
    y = selective_scan(operands, 32, Place(documents))
    torch.testing.assert_close(y[:, 11:], selective_scan(alone, 32), rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [16, 512])
def test_long_sequences_lose_no_digits(chunk: int) -> None:
    torch.manual_seed(7)
    shapes = ((1, 512, CHANNELS), (1, 512, 2 * STATE))
    x, bc = (torch.randn(shape) for shape in shapes)
    step = torch.empty(1, 512, CHANNELS).uniform_(0.1, 3.0).expm1().log()  # inverse of the softplus
    dynamics = (torch.zeros(CHANNELS, STATE), torch.ones(CHANNELS), torch.zeros(CHANNELS))
    for dtype, error in ((torch.float32, 5e-7), (torch.bfloat16, 8e-3)):
        narrow = Operands(*(each.to(dtype) for each in (x, step, bc)), *dynamics)
        exact, _ = recurrence(Operands(*(each.double() for each in narrow)))
        y, state = selective_scan_on(narrow, chunk)
        assert (y.dtype, state.dtype) == (dtype, torch.float32)
        assert (y.double() - exact).abs().max() < error * exact.abs().max()
