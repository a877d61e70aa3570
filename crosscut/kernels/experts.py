r"""Arithmetic of a mixture of experts on one device: rows sorted by expert, and a product for each expert.

Each of T tokens goes through K of E experts, which makes N = T K rows. They are sorted by expert, so that the rows of
an expert are adjacent, and an expert without rows is an empty group:

    x [T, H] --spread--> rows [N, H] --multiply_groups--> [N, F] --> ... --> [N, H] --collect--> y [T, H]

`collect` adds up the K rows of each token in the order in which the token chose its experts. `spread` and `collect` are
each other's backward pass. They only select rows, so their results do not depend on the number of threads. The backward
pass of an index, `x[i]`, adds rows in any order.

Shapes: T tokens, K experts of a token, E experts, N rows, H hidden, F width of an expert, O outputs, I inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from crosscut.kernels.functions import AutogradContext, run

_ALIGNMENT = 16
"""Number of bytes of which the rows of a matrix must be a multiple for PyTorch's grouped product."""
_FEW = 64
"""Number of rows up to which a loop over the experts is faster than PyTorch's grouped product on the CPU."""

_IN_CACHE = 1 << 17
"""Number of elements that stay in the cache of a processor's core."""
_LEAST_IN_TURN = 1 << 17
"""Mean number of elements of an expert's activations from which the calls for each expert cost less than they save."""


class Places(NamedTuple):
    """Places of the rows of all tokens, sorted by expert."""

    tokens: Tensor
    """Token of each row [N]."""
    slots: Tensor
    """Index of each row [N] in the flattened choices [T, K]."""
    rows: Tensor
    """Row of each of the flattened choices [N], the inverse of `slots`."""
    ends: Tensor
    """Index after the last row of each expert [E]."""


def sort_by_expert(chosen: Tensor, counts: Tensor) -> Places:
    """Sort the choices `chosen` [T, K] by expert. `counts` [E] is the number of rows of each expert, as integers. Rows
    of the same expert keep the order of the tokens.
    """
    flat = chosen.flatten()
    slots = flat.argsort(stable=True)
    rows = torch.zeros_like(slots).scatter(0, slots, torch.arange(len(slots), device=slots.device))
    return Places(slots // chosen.shape[1], slots, rows, counts.cumsum(0))


def spread(x: Tensor, places: Places) -> Tensor:
    """Copy each token of `x` [T, H] to the rows of its experts: [N, H]."""
    rows: Tensor = run(_Spread, x, places, twin=_copied)
    return rows


def _copied(x: Tensor, places: Places) -> Tensor:
    """Copy the tokens, in such a way that the gradient of a token is a sum over a dimension. That of
    `index_select(0, places.tokens)` would be added in any order.
    """
    copies = x.unsqueeze(1).expand(-1, len(places.slots) // len(x), -1)
    return copies.flatten(0, 1).index_select(0, places.slots)


def collect(rows: Tensor, places: Places, num_tokens: int) -> Tensor:
    """Add up the rows [N, H] of each token: [T, H]."""
    collected: Tensor = run(_Collect, rows, places, num_tokens, twin=_collected)
    return collected


def _collected(rows: Tensor, places: Places, num_tokens: int) -> Tensor:
    return _ordered(rows, places.rows, num_tokens).sum(1)


def _ordered(rows: Tensor, order: Tensor, num_tokens: int) -> Tensor:
    """Put the rows in the order of the tokens: [tokens, K, H]."""
    return rows.index_select(0, order).view(num_tokens, -1, rows.shape[1])


def _summed(rows: Tensor, order: Tensor, num_tokens: int) -> Tensor:
    """Put the rows in the order of the tokens, and add up those of each token. On the CPU, some tokens at a time, so
    that the ordered rows stay in the cache.
    """
    if rows.device.type != "cpu":
        return _ordered(rows, order, num_tokens).sum(1)
    out = rows.new_empty(num_tokens, rows.shape[1])
    step = max(_IN_CACHE * num_tokens // rows.numel(), 1)
    for some, of_some in zip(out.split(step), order.view(num_tokens, -1).split(step), strict=True):
        torch.sum(_ordered(rows, of_some.flatten(), len(some)), 1, out=some)
    return out


class _PlacesContext(AutogradContext[tuple[Tensor]], Protocol):
    num_tokens: int


class _Spread(Function):
    @staticmethod
    def forward(ctx: _PlacesContext, x: Tensor, places: Places) -> Tensor:
        ctx.save_for_backward(places.rows)
        ctx.num_tokens = len(x)
        return x.index_select(0, places.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: _PlacesContext, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _summed(grad, rows, ctx.num_tokens), None


class _Collect(Function):
    @staticmethod
    def forward(ctx: _PlacesContext, rows: Tensor, places: Places, num_tokens: int) -> Tensor:
        ctx.save_for_backward(places.tokens)
        return _summed(rows, places.rows, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: _PlacesContext, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grad.index_select(0, tokens), None, None


def multiply_groups(rows: Tensor, weight: Tensor, ends: Tensor, *, skips: bool = False) -> Tensor:
    """Multiply the rows [N, I] of each expert by the expert's matrix in `weight` [E, O, I]: [N, O]. `ends` [E] is the
    index after the last row of each expert. An expert without rows is not read.

    In bfloat16, PyTorch's grouped product multiplies; in other types, a loop over the experts. Compiled code calls the
    function as one operator. With `skips`, the result is zeros, for a repetition whose result no code reads.
    """
    result: Tensor = _Skip.apply(rows, weight, ends) if skips else _multiply(rows, weight, ends)
    return result


class _Skip(Function):
    """Autograd function that saves what the product saves, and returns zeros. It has no backward pass."""

    @staticmethod
    def forward(ctx: AutogradContext[tuple[Tensor, ...]], rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return rows.new_zeros(rows.shape[0], weight.shape[1])


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows [N, I] of each group by a matrix in `matrices` [E, I, O]: [N, O]."""
    if _suits_grouped(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends.int())
    out = rows.new_empty(len(rows), matrices.shape[2])
    for first, last, matrix in _groups(ends, matrices):
        if first < last:
            torch.mm(rows[first:last], matrix, out=out[first:last])
    return out


def _groups(ends: Tensor, matrices: Tensor) -> list[tuple[int, int, Tensor]]:
    """Return the first row, the row after the last one, and the matrix of each group."""
    lasts: list[int] = ends.tolist()
    return list(zip([0, *lasts], lasts, matrices, strict=False))


def _suits_grouped(rows: Tensor, matrices: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these factors and is fast."""
    is_few = rows.device.type == "cpu" and len(rows) <= _FEW
    multiple = _ALIGNMENT // rows.element_size()
    return rows.dtype is torch.bfloat16 and not is_few and all(size % multiple == 0 for size in matrices.shape[1:])


@torch.library.custom_op("crosscut::multiply_groups", mutates_args=())
def _multiply(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _product(rows, weight.mT, ends)


@torch.library.custom_op("crosscut::group_input_gradient", mutates_args=())
def _input_gradient(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _product(grad.contiguous(), weight, ends)


@torch.library.custom_op("crosscut::group_weight_gradient", mutates_args=())
def _weight_gradient(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    grad = grad.contiguous()
    if _suits_grouped(rows, grad.new_empty(1, grad.shape[1], rows.shape[1])):
        return F.grouped_mm(grad.mT, rows, offs=ends.int())
    out = grad.new_empty(len(ends), grad.shape[1], rows.shape[1])
    for first, last, matrix in _groups(ends, out):
        torch.mm(grad[first:last].t(), rows[first:last], out=matrix)  # zeros if there are no rows
    return out


@_multiply.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    del ends
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    del ends
    return grad.new_empty(grad.shape[0], weight.shape[2])


@_weight_gradient.register_fake
def _(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(ends.shape[0], grad.shape[1], rows.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows = _input_gradient(grad, weight, ends) if ctx.needs_input_grad[0] else None
    of_weight = _weight_gradient(grad, rows, ends) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight, None


_multiply.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.crosscut.multiply_groups)
def _flops(rows: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.crosscut.group_input_gradient)
def _flops_of_input(grad: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return 2 * grad[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.crosscut.group_weight_gradient)
def _flops_of_weight(grad: Sequence[int], rows: Sequence[int], *_: object, **__: object) -> int:
    return 2 * grad[0] * grad[1] * rows[1]


Activation = Callable[..., Tensor]
"""Function of one or several tensors of the same shape, element by element."""


def weigh(activate: Activation, weights: Tensor, *inputs: Tensor) -> Tensor:
    """Return activate(*inputs) * weights, with a weight for each row: [..., F] of inputs [..., F] and weights [...].

    Only the inputs and the weights are kept for the backward pass. An expert's result is linear in the activation, so
    the weight may stand before the last product. Behind it, the backward pass would need the results of all rows.
    """
    return run(_Weigh, activate, weights, *inputs, twin=_weighed)


def _weighed(activate: Activation, weights: Tensor, *inputs: Tensor) -> Tensor:
    return (activate(*inputs) * weights.unsqueeze(-1)).to(inputs[0].dtype)


class _WeighContext(AutogradContext[tuple[Tensor, ...]], Protocol):
    activate: Activation


class _Weigh(Function):
    """Autograd function that computes `_weighed` and keeps only the inputs and the weights."""

    @staticmethod
    def forward(ctx: _WeighContext, activate: Activation, weights: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *inputs)
        ctx.activate = activate
        return activate(*inputs).mul_(weights.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: _WeighContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *inputs = ctx.saved_tensors
        of_weights, of_inputs = _weighed_gradients(ctx.activate, weights, inputs, grad)
        return None, of_weights, *of_inputs


def _weighed_gradients(
    activate: Activation, weights: Tensor, inputs: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the gradients of the weights and of the inputs of `_weighed`."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        activated = activate(*leaves)
    product = grad * activated.detach()
    of_weights = product.to(weights.dtype).sum(-1)
    of_activated = torch.mul(grad, weights.unsqueeze(-1), out=product)  # the same memory
    return of_weights, torch.autograd.grad(activated, leaves, of_activated)


def in_turn(activate: Activation, rows: Tensor, weights: Tensor, ends: Tensor, *matrices: Tensor) -> Tensor:
    """Pass the rows [N, H] through their experts, and multiply the results by the rows' weights [N]: [N, H]. `matrices`
    are those before the activation [E, F, H], in the order of its inputs, and the last one [E, H, F].

    The result and the gradients are those of `multiply_groups` and `weigh`, and so is what is kept. If the activation
    treats all elements alike, the bits are the same. But each expert finishes before the next one begins: between its
    products, its numbers stay in the processor's cache, and no tensor of all rows is made that is not kept.
    """
    result: Tensor = _InTurn.apply(activate, rows, weights, ends, *matrices)
    return result


def takes_turns(rows: Tensor, weights: Tensor, matrix: Tensor) -> bool:
    """Whether `in_turn` suits: on the CPU in types without a grouped product, for experts that are trained and have
    many rows. `matrix` [E, F, H] is the first one of the experts.
    """
    return (
        torch.is_grad_enabled()
        and matrix.requires_grad
        and rows.device.type == "cpu"
        and rows.dtype is weights.dtype in (torch.float32, torch.float64)
        and len(rows) * matrix.shape[1] >= _LEAST_IN_TURN * len(matrix)
        and not isinstance(rows, FakeTensor)
    )


class _InTurn(Function):
    @staticmethod
    def forward(
        ctx: _WeighContext, activate: Activation, rows: Tensor, weights: Tensor, ends: Tensor, *matrices: Tensor
    ) -> Tensor:
        *expand, contract = matrices
        inner = [rows.new_empty(len(rows), matrix.shape[1]) for matrix in expand]
        activated, out = rows.new_empty(len(rows), contract.shape[2]), torch.empty_like(rows)
        for own, *of_expert in _by_expert(ends, *matrices):
            for made, matrix in zip(inner, of_expert, strict=False):
                torch.mm(rows[own], matrix.t(), out=made[own])
            torch.mul(activate(*(made[own] for made in inner)), weights[own, None], out=activated[own])
            torch.mm(activated[own], of_expert[-1].t(), out=out[own])
        ctx.save_for_backward(rows, weights, ends, activated, *inner, *matrices)
        ctx.activate = activate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _WeighContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, ends, activated, *others = ctx.saved_tensors
        inner, matrices = others[: len(others) // 2], others[len(others) // 2 :]
        of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
        of_matrices = [torch.empty_like(matrix) for matrix in matrices]
        for own, *of_expert in _by_expert(ends, *matrices, *of_matrices):
            (*expand, contract), changes = of_expert[: len(matrices)], of_expert[len(matrices) :]
            torch.mm(grad[own].t(), activated[own], out=changes[-1])
            of_activated = torch.mm(grad[own], contract)
            of_weights[own], gradients = _weighed_gradients(
                ctx.activate, weights[own], [made[own] for made in inner], of_activated
            )
            for place, (gradient, matrix, change) in enumerate(zip(gradients, expand, changes, strict=False)):
                torch.mm(gradient.t(), rows[own], out=change)
                if place:
                    of_rows[own] += torch.mm(gradient, matrix)
                else:
                    torch.mm(gradient, matrix, out=of_rows[own])
        return None, of_rows, of_weights, None, *of_matrices


def _by_expert(ends: Tensor, *stacks: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the slice of the rows of each expert, and the expert's part of each of the stacks."""
    lasts: list[int] = ends.tolist()
    for first, last, *parts in zip([0, *lasts], lasts, *stacks, strict=False):
        yield slice(first, last), *parts


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x` [..., I] by `weight` [O, I] in the wider of their types: [..., O]. `x` is kept for the backward pass
    in its own type.
    """
    return run(_WideLinear, x, weight, twin=_wide_product)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight)


class _WideLinear(Function):
    @staticmethod
    def forward(ctx: AutogradContext[tuple[Tensor, Tensor]], x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide_product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[tuple[Tensor, Tensor]], grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).to(weight.dtype)
        return (grad @ weight).to(x.dtype), of_weight
