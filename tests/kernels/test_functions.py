import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from crosscut.kernels.functions import run


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        y = x * factor
        ctx.factor = factor
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grad * ctx.factor + 0.0 * y, None


def test_with_gradients_it_is_the_function():
    x = torch.ones(2, requires_grad=True)
    run(Doubled, x, 2.0).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_without_gradients_it_gives_the_same_and_keeps_nothing():
    x = torch.ones(2, requires_grad=True)
    kept: list[weakref.ref[Tensor]] = []

    class Watched(Doubled):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            y = x * factor
            ctx.save_for_backward(y)
            kept.append(weakref.ref(y))
            return y.clone()

    with torch.no_grad():
        y = run(Watched, x, 3.0)
    assert y.tolist() == [3.0, 3.0]
    assert not y.requires_grad
    assert kept[0]() is None
