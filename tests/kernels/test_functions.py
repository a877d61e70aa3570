import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from crosscut.kernels.functions import add_owned, run


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


def test_a_compiler_traces_the_twin_and_eager_code_runs_the_function():
    def computed(x: Tensor) -> Tensor:
        return run(Doubled, x, 2.0, twin=lambda x, factor: x * factor + 1.0)

    x = torch.ones(2, requires_grad=True)
    assert computed(x).tolist() == [2.0, 2.0]
    compiled: Any = torch.compile(computed, fullgraph=True, backend="eager")
    assert compiled(x).tolist() == [3.0, 3.0]


def test_a_sum_takes_the_place_of_its_first_term_except_under_a_compiler():
    total, more = torch.ones(2), torch.ones(2)
    assert add_owned(total, more) is total
    assert total.tolist() == [2.0, 2.0]
    compiled: Any = torch.compile(add_owned, fullgraph=True, backend="eager")
    assert compiled(total, more).tolist() == [3.0, 3.0]
    assert total.tolist() == [2.0, 2.0]
