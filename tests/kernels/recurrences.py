"""Sizes, documents and states of the recurrences that are compared with their steps, token by token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crosscut.kernels.recurrent.chunks import Place

BATCH, HEADS, HEAD, GROUPS, STATE = 2, 6, 4, 3, 5
GIVEN: list[dict[str, bool]] = [
    {}, {"documents": True}, {"state": True}, {"documents": True, "state": True}, {"real": True}
]  # fmt: skip


def place_of(length: int, *, documents: bool = False, state: bool = False, real: bool = False) -> Place:
    starts = torch.rand(BATCH, length) < 0.2
    first = torch.randn(BATCH, GROUPS, STATE, HEADS // GROUPS * HEAD, dtype=torch.float64)
    return Place(
        starts.cumsum(1) if documents else None,
        first.requires_grad_() if state else None,
        torch.arange(length) < torch.tensor([[length - 3], [0]]) if real else None,
    )


def next_place(length: int) -> Place:
    """A state, and tokens of which the last ones of the second sequence are padding: all of a single token."""
    is_real = torch.arange(length) < torch.tensor([[length], [length // 2]])
    return place_of(length, state=True)._replace(is_real=is_real)


def states_of_heads(state: Tensor) -> Tensor:
    """State of each head [B, A, N, P], from those of the groups."""
    return state.unflatten(-1, (-1, HEAD)).transpose(2, 3).flatten(1, 2)


def gradients(outputs: Any, operands: Sequence[Tensor], place: Place) -> list[Tensor]:
    torch.manual_seed(5)
    loss = sum((each * torch.randn_like(each)).sum() for each in outputs)
    wanted = [*operands, *(() if place.state is None else (place.state,))]
    return list(torch.autograd.grad(loss, wanted))
