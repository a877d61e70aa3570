"""Fused functions against their plain twins: the same values and the same gradients, to the last bit.

Factors are whole numbers, so that sums are exact in any order.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import Layout, LayoutError
from crosscut.kernels.deferral import Deferral
from crosscut.kernels.products import ORDINARY, deferring
from crosscut.parallel import CollectiveRecorder, ParallelMesh, Sent, fused, make_mesh
from tests.parallel.stand_ins import products_in_pieces
from tests.parallel.twins import CPU, LAYOUTS, each, part, split_sequence
from tests.ranks import RankPool
from tests.refusals import refusal

B, S, I = 4, 8, 6  # noqa: E741 - the shapes' names
WIDTHS = ((10,), (10, 4, 3), (4, 3))
"""Outputs of each layer that shares the input: of one layer, of three, and of two that are narrower than the input."""
SPLIT = Layout(tensor=2, sequence_parallel=True)

Run = tuple[list[Tensor], list[Sent]]


def _whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def _run(function: Callable[..., Any], mesh: ParallelMesh, x: Tensor, weights: Any, biases: Any) -> Run:
    """Outputs and all gradients of a function of leaves, and the messages of both passes."""
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    for leaf in leaves:
        leaf.grad = None
    with CollectiveRecorder(mesh) as recorder:
        y = function(x, weights, biases, mesh=mesh)
        outputs = [y] if isinstance(y, Tensor) else list(y)
        torch.autograd.backward(
            outputs, [_whole_numbers(*y.shape, seed=90 + mesh.tensor.rank + i) for i, y in enumerate(outputs)]
        )
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves)], list(recorder.sent)


def _entering(layout: Layout, widths: Sequence[int], has_bias: bool, num_pieces: int) -> list[Run]:
    """On a rank: the plain twin and the fused function that enter and multiply, with the same arguments."""
    mesh = make_mesh(layout, CPU)
    rank = mesh.tensor.rank
    x = part(_whole_numbers(B, S, I, seed=1), mesh, split_sequence(layout)).requires_grad_()
    weights = [_whole_numbers(width, I, seed=10 + i + 5 * rank).requires_grad_() for i, width in enumerate(widths)]
    biases = [_whole_numbers(width, seed=30 + rank).requires_grad_() if has_bias else None for width in widths]
    stand_ins = products_in_pieces() if layout.symmetric_memory else nullcontext()
    with stand_ins, mock.patch.object(fused, "num_pieces", lambda *_: num_pieces):
        twins = (fused.enter_then_multiply, fused.enter_and_multiply)
        return [_run(function, mesh, x, weights, biases) for function in twins]


def _leaving(layout: Layout, has_bias: bool, num_pieces: int, has_adapter: bool = False) -> list[Run]:
    """On a rank: the plain twin and the fused function that multiply and leave, with the same arguments."""
    mesh = make_mesh(layout, CPU)
    rank = mesh.tensor.rank
    x, low = (_whole_numbers(B, S, width, seed=1 + rank).requires_grad_() for width in (I, 3))
    weight, up = (_whole_numbers(10, width, seed=10 + rank).requires_grad_() for width in (I, 3))
    bias = _whole_numbers(10, seed=30).requires_grad_() if has_bias else None

    def with_lists(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weights, biases, *, mesh: function(
            x, weights[0], biases[0], mesh=mesh, adapter=fused.LowRank(*weights[1:]) if has_adapter else None
        )

    weights = [weight, low, up] if has_adapter else [weight]
    stand_ins = products_in_pieces() if layout.symmetric_memory else nullcontext()
    with stand_ins, mock.patch.object(fused, "num_pieces", lambda *_: num_pieces):
        twins = (fused.multiply_then_leave, fused.multiply_and_leave)
        return [_run(with_lists(function), mesh, x, weights, [bias]) for function in twins]


def _assert_equal(ranks: RankPool, layout: Layout, job: Callable[..., Any], *cases: tuple[Any, ...]) -> None:
    """Compare the results of each case; the arguments of a case follow the layout."""
    for results in ranks.run(layout.tensor, each, job, [(layout, *case) for case in cases]):
        for case, ((plain, _), (result, _)) in zip(cases, results, strict=True):
            assert len(result) == len(plain) > 2
            for one, other in zip(result, plain, strict=True):
                assert torch.equal(one, other), case
                assert other.any(), case


def _pieces(layout: Layout) -> tuple[int, ...]:
    return (1, 2) if layout.sequence_parallel else (1,)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_entering_at_once_is_entering_then_multiplying(ranks: RankPool, layout: Layout) -> None:
    _assert_equal(ranks, layout, _entering, *product(WIDTHS, (True, False), _pieces(layout)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_leaving_at_once_is_multiplying_then_leaving(ranks: RankPool, layout: Layout) -> None:
    _assert_equal(ranks, layout, _leaving, *product((True, False), _pieces(layout)))


@pytest.mark.parametrize("tensor", [2, 4])
def test_products_in_symmetric_memory_are_the_plain_twins_too(ranks: RankPool, tensor: int) -> None:
    layout = Layout(tensor=tensor, sequence_parallel=True, symmetric_memory=True)
    _assert_equal(ranks, layout, _entering, *product(WIDTHS, (True, False), (1,)))
    _assert_equal(ranks, layout, _leaving, (True, 1), (False, 1))


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_fused_functions_send_what_the_plain_twins_send_and_gather_the_input_again(
    ranks: RankPool, layout: Layout
) -> None:
    for (_, plain), (_, sent) in ranks.run(layout.tensor, _entering, layout, WIDTHS[1], True, 1):
        again = [Sent("all_gather", "tensor", B * S * I)] if layout.sequence_parallel else []
        assert sorted(sent) == sorted([*plain, *again])
    for (_, plain), (_, sent) in ranks.run(layout.tensor, _leaving, layout, True, 1):
        assert sent == plain


class _Copies(TorchDispatchMode):
    """Counter of the elements that operators copy outside of products and messages."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copies = (torch.ops.aten.cat, torch.ops.aten.clone, torch.ops.aten.copy_)
        self.elements += result.numel() if func.overloadpacket in copies else 0
        return result


def _copied(layout: Layout, inputs: int, outputs: int, num_pieces: int) -> list[int]:
    """Elements that entering and leaving copy, for a region of `inputs` and `outputs` columns of this rank."""
    mesh, x = make_mesh(layout, CPU), torch.ones(B, S, inputs, requires_grad=True)
    weights = [torch.ones(shape, requires_grad=True) for shape in ((outputs, I), (I, inputs))]
    found = []
    with mock.patch.object(fused, "num_pieces", lambda *_: num_pieces):
        for leaf, call in (
            (x, lambda x: fused.multiply_and_leave(x, weights[1], None, mesh=mesh)),
            (
                torch.ones(B, S // layout.tensor, I, requires_grad=True),
                lambda x: fused.enter_and_multiply(x, weights[:1], [None], mesh=mesh)[0],
            ),
        ):
            with _Copies() as copies:
                y = call(leaf)
                torch.autograd.grad(y, (leaf,), torch.ones_like(y))
            found.append(copies.elements)
    return found


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_a_narrow_region_is_copied_in_place_of_the_sequence_that_is_sent(ranks: RankPool, num_pieces: int) -> None:
    for leaving, entering in ranks.run(2, _copied, SPLIT, 1, 2, num_pieces):
        joined = B * S // 2 * I if num_pieces == 2 else 0  # the halves of a sum
        assert (leaving - joined, entering) == (3 * B * S * 1, 2 * B * S * 2)
    for leaving, entering in ranks.run(2, _copied, SPLIT, I, 2 * I, num_pieces):
        joined = B * S // 2 * I if num_pieces == 2 else 0
        assert (leaving - joined, entering) == (2 * B * S * I, 3 * B * S * I)


@pytest.mark.parametrize("layout", [Layout(tensor=1), Layout(tensor=2), SPLIT], ids=str)
def test_the_product_of_an_adapter_is_added_before_g(ranks: RankPool, layout: Layout) -> None:
    _assert_equal(ranks, layout, _leaving, (False, 1, True), (False, 2, True))


def _too_flat(layout: Layout) -> list[str]:
    mesh, messages = make_mesh(layout, CPU), []
    x, weight = torch.ones(4, I), torch.ones(I, I)
    for function, arguments in (
        (fused.enter_then_multiply, (x, [weight], [None])),
        (fused.enter_and_multiply, (x, [weight], [None])),
        (fused.multiply_then_leave, (x, weight, None)),
        (fused.multiply_and_leave, (x, weight, None)),
    ):
        messages.append(refusal(LayoutError, function, *arguments, mesh=mesh))
    return messages


def test_fused_functions_refuse_what_the_plain_twins_refuse(ranks: RankPool) -> None:
    for messages in ranks.run(2, _too_flat, SPLIT):
        assert "must have at least three dimensions" in messages[0]
        assert len(set(messages)) == 1


def _not_needed(layout: Layout) -> tuple[Tensor, list[Sent], list[Tensor], list[Tensor]]:
    """The result that nobody needs, what it sends, and the gradients beside those of a result that is needed."""
    mesh = make_mesh(layout, CPU)
    x = _whole_numbers(B, S, I, seed=1 + mesh.tensor.rank).requires_grad_()
    weight, bias = _whole_numbers(10, I, seed=3).requires_grad_(), _whole_numbers(10, seed=4).requires_grad_()
    gradients = []
    for leave in (fused.multiply_and_leave, fused.skip_and_leave):
        with CollectiveRecorder(mesh) as recorder:
            y = leave(x, weight, bias, mesh=mesh)
        gradients.append(torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y)))
    return y.detach(), list(recorder.sent), *gradients


@pytest.mark.parametrize("layout", [Layout(tensor=2), SPLIT], ids=str)
def test_a_result_that_nobody_needs_is_zeros_sends_nothing_and_has_its_gradients(
    ranks: RankPool, layout: Layout
) -> None:
    for y, sent, expected, gradients in ranks.run(2, _not_needed, layout):
        assert torch.equal(y, torch.zeros(B, S // 2 if layout.sequence_parallel else S, 10).double())
        assert sent == []
        for one, other in zip(gradients, expected, strict=True):
            assert torch.equal(one, other)


def _is_freed_before_deferred_gradients() -> bool:
    mesh, deferral = make_mesh(Layout(), CPU), Deferral()
    leaf, weight = _whole_numbers(B, S, I, seed=1).requires_grad_(), _whole_numbers(4, I, seed=2).requires_grad_()
    hidden = weakref.ref(leaf)
    outputs = fused.enter_and_multiply(leaf * 2, (weight,), (None,), mesh=mesh, products=deferring(ORDINARY, deferral))
    with deferral.collecting() as deferred:
        outputs[0].sum().backward()
    expected = (2 * leaf.detach()).sum((0, 1)).expand(4, I)
    del leaf, outputs
    is_freed = hidden() is None
    assert weight.grad is None
    assert deferred.compute() == 1
    assert torch.equal(weight.grad, expected)
    return is_freed


def test_a_deferred_gradient_does_not_hold_the_input_of_its_stage(ranks: RankPool) -> None:
    """Its factor would otherwise keep the graph of the forward pass, which holds the input and the input's gradient."""
    assert ranks.run(1, _is_freed_before_deferred_gradients) == [True]


def _results_of_a_lone_rank(with_gradients: bool) -> list[Tensor]:
    """On a rank: outputs of the fused functions. Without gradients, a call of an autograd function fails."""
    mesh = make_mesh(Layout(), CPU)
    x, weight, up = (_whole_numbers(*shape, seed=i) for i, shape in enumerate([(B, S, I), (10, I), (10, 3)]))
    bias, adapter = _whole_numbers(10, seed=5), fused.LowRank(_whole_numbers(B, S, 3, seed=6), up)
    calls_none = nullcontext() if with_gradients else mock.patch.object(fused, "run", None)
    with torch.set_grad_enabled(with_gradients), calls_none:
        return [
            *fused.enter_and_multiply(x, [weight, weight], [bias, None], mesh=mesh),
            fused.multiply_and_leave(x, weight, bias, mesh=mesh),
            fused.multiply_and_leave(x, weight, None, mesh=mesh, adapter=adapter),
        ]


def test_a_lone_rank_without_gradients_computes_the_same_bits(ranks: RankPool) -> None:
    """Generation on one rank calls no autograd function, and gets the values that training gets."""
    (training,), (generating,) = (ranks.run(1, _results_of_a_lone_rank, grads) for grads in (True, False))
    for one, other in zip(training, generating, strict=True):
        assert torch.equal(one, other)
        assert one.any()
