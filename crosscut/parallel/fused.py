r"""Linear layers whose messages between tensor ranks overlap with their matrix products.

f and g are the paper's operators at the two ends of a parallel region. f (`enter_tensor_parallel`) passes the input
into the region, and g (`leave_tensor_parallel`) sums the partial results of all ranks. `enter_and_multiply` fuses f
with the matrix products after f. `multiply_and_leave` fuses g with the matrix product before g.

In this file, each fused function stands below its plain twin. The twin has a few lines and computes the same result,
but runs messages and products one after another. The fused function runs a product between the start and the end of a
message:

        twin, backward:    grad_x = grad W,  sum grad_x,  grad_W = grad^T x
        fused, backward:   grad_x = grad W,  start the sum of grad_x,  grad_W = grad^T x,  wait for the sum

Under sequence parallelism, `enter_and_multiply` saves only this rank's part of the sequence, and gathers the sequence
again in the backward pass. The fused functions also split a large batch into two halves: the ranks send one half while
they multiply the other half. Where this copies less, products read and write the parts of sequences in the order in
which ranks send them, and only tensors inside the region are put into the order of the sequences (`works_on_parts`).

Shapes: B batch, S sequence, I in, O out, T tensor ranks. Under sequence parallelism, tensors outside a parallel region
have S/T in place of S.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.config.conventions import num_pieces
from crosscut.kernels.functions import AutogradContext, add_owned, run
from crosscut.kernels.products import ORDINARY, Products, add_product, as_rows, bias_gradient, multiply_into
from crosscut.parallel.collectives import wait
from crosscut.parallel.halves import (
    finish_gather,
    from_parts,
    start_gather,
    start_gather_again,
    start_sum,
    summed_shape,
    to_parts,
    works_on_parts,
    write_from_parts,
)
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.operators import enter_tensor_parallel, leave_tensor_parallel, require_sequence
from crosscut.parallel.symmetric_memory import gather_and_multiply, multiply_and_scatter

Biases = Sequence[Tensor | None]


def enter_then_multiply(
    x: Tensor, weights: Sequence[Tensor], biases: Biases, *, mesh: ParallelMesh
) -> tuple[Tensor, ...]:
    """Apply f (`enter_tensor_parallel`), then compute X A_i + b_i for each weight. This is the plain twin of
    `enter_and_multiply`.
    """
    entered = enter_tensor_parallel(x, mesh)
    return tuple(F.linear(entered, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def enter_and_multiply(
    x: Tensor, weights: Sequence[Tensor], biases: Biases, *, mesh: ParallelMesh, products: Products = ORDINARY
) -> tuple[Tensor, ...]:
    """Apply f (`enter_tensor_parallel`) to `x` [B, S, I], then compute X A_i + b_i for each weight [O, I] and its bias
    [O] (or None). Return one output [B, S, O] per weight.

    | sequence parallelism | forward                              | backward                                           |
    |----------------------|--------------------------------------|----------------------------------------------------|
    | off                  | nothing is sent                      | all-reduce of the input's gradient, overlapped     |
    |                      |                                      | with the products of the weights' gradients        |
    | on                   | all-gather of the input; if large,   | all-gather of the input, overlapped with the       |
    |                      | overlapped with the products         | product of the input's gradient; then              |
    |                      |                                      | reduce-scatter of the input's gradient, overlapped |
    |                      |                                      | with the products of the weights' gradients        |

    Source: paper, section 3, eq. 3; Korthikanti et al. 2022, section 4.2.2. Raises `LayoutError` if, under sequence
    parallelism, `x` has fewer than three dimensions.
    """
    require_sequence(x, mesh)
    if mesh.symmetric_memory:
        outputs = gather_and_multiply(x, weights, mesh)
        return tuple(y if bias is None else y + bias for y, bias in zip(outputs, biases, strict=True))
    if _is_alone(mesh):
        return tuple(products.output(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return run(_EnterAndMultiply, x, mesh, products, *weights, *biases)


class _EnterContext(AutogradContext[tuple[Tensor, ...]], Protocol):
    mesh: ParallelMesh
    in_parts: bool
    products: Products
    has_bias: list[bool]


class _EnterAndMultiply(Function):
    @staticmethod
    def forward(
        ctx: _EnterContext, x: Tensor, mesh: ParallelMesh, products: Products, *layers: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = cast("Sequence[Tensor]", layers[: len(layers) // 2]), layers[len(layers) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.mesh, ctx.products, ctx.has_bias = mesh, products, [bias is not None for bias in biases]
        pieces = _pieces(x, mesh, products, x.numel() * mesh.tensor.size)
        width = sum(weight.shape[0] for weight in weights)
        ctx.in_parts = in_parts = works_on_parts(mesh, inside=2 * width, sent=3 * x.shape[-1])
        entering = [start_gather(piece, mesh) for piece in pieces]
        if len(entering) == 1:
            whole = finish_gather(entering[0], mesh, in_parts=in_parts)
            outputs = tuple(products.output(whole, *layer) for layer in zip(weights, biases, strict=True))
            return tuple(from_parts(y, mesh) for y in outputs) if in_parts else outputs
        shape = (x.shape[0], x.shape[1] * mesh.tensor.size, *x.shape[2:-1])
        outputs = tuple(x.new_empty(*shape, weight.shape[0]) for weight in weights)
        for i, piece in enumerate(entering):
            whole = finish_gather(piece, mesh, in_parts=in_parts)
            for y, weight, bias in zip(outputs, weights, biases, strict=True):
                own = y.chunk(len(entering))[i]
                if in_parts:
                    write_from_parts(own, products.output(whole, weight, bias), mesh)
                else:
                    multiply_into(own, whole, weight, bias)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: _EnterContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        mesh, products = ctx.mesh, ctx.products
        needs_x, _, _, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = needs[: len(weights)], needs[len(weights) :]
        entering = start_gather_again(x, grads[0], mesh) if any(needs_weights) else None
        in_order = grads
        if ctx.in_parts:
            grads = tuple(to_parts(grad, mesh) for grad in grads)
        pending = start_sum(_input_gradient(products, grads, weights), mesh, in_parts=ctx.in_parts) if needs_x else None
        grad_biases = [
            bias_gradient(grad) if has_bias and wanted else None
            for grad, has_bias, wanted in zip(in_order, ctx.has_bias, needs_biases, strict=True)
        ]
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if entering is not None:
            whole = finish_gather(entering, mesh, in_parts=ctx.in_parts)
            grad_weights = [
                _weight_gradient(products, grad, whole, weight) if wanted else None
                for grad, weight, wanted in zip(grads, weights, needs_weights, strict=True)
            ]
        grad_x = None if pending is None else wait(pending, mesh.tensor)
        return grad_x, None, None, *grad_weights, *grad_biases


def _is_alone(mesh: ParallelMesh) -> bool:
    """Whether the products can be computed without an autograd function, because there is only one tensor rank and no
    backward pass. For a single token, the overhead of an autograd function takes as long as a small product.
    """
    return mesh.tensor.size == 1 and not torch.is_grad_enabled()


def multiply_inside(x: Tensor, weight: Tensor, products: Products = ORDINARY, *, skips: bool = False) -> Tensor:
    """Multiply `x` [B, S, I] by `weight` [O, I] inside a parallel region, without f and g: [B, S, O]. Sends nothing.
    With `skips`, the result is zeros, for a repetition whose result no code reads.
    """
    return run(_MultiplyInside, x, weight, products, skips)


class _InsideContext(AutogradContext[tuple[Tensor, Tensor]], Protocol):
    products: Products


class _MultiplyInside(Function):
    @staticmethod
    def forward(ctx: _InsideContext, x: Tensor, weight: Tensor, products: Products, skips: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return x.new_zeros(*x.shape[:-1], weight.shape[0]) if skips else products.output(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _InsideContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _, _ = ctx.needs_input_grad
        return *_factor_gradients(ctx.products, grad, (x, weight, needs_x, needs_weight)), None, None


class LowRank(NamedTuple):
    """Two factors whose product is the output of a low-rank adapter. This product is added to X_i A_i before g."""

    low: Tensor
    """First factor, [B, S, r]: the input times the adapter's first matrix."""
    up: Tensor
    """Second factor, [O, r]."""


def multiply_then_leave(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, mesh: ParallelMesh, adapter: LowRank | None = None
) -> Tensor:
    """Compute X_i A_i, apply g (`leave_tensor_parallel`), then add the bias once. This is the plain twin of
    `multiply_and_leave`.
    """
    product = F.linear(x, weight) if adapter is None else F.linear(x, weight) + F.linear(*adapter)
    left = leave_tensor_parallel(product, mesh)
    return left if bias is None else left + bias


def multiply_and_leave(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    mesh: ParallelMesh,
    products: Products = ORDINARY,
    adapter: LowRank | None = None,
) -> Tensor:
    """Multiply `x` [B, S, I] by `weight` [O, I] (X_i A_i), apply g (`leave_tensor_parallel`), then add `bias` [O] once:
    [B, S, O].

    The product of `adapter` is added to X_i A_i before g, so an adapter adds no message.

    | sequence parallelism | forward                                  | backward                                       |
    |----------------------|------------------------------------------|------------------------------------------------|
    | off                  | all-reduce of the product                | nothing is sent                                |
    | on                   | reduce-scatter of the product; if large, | all-gather of the output's gradient; if large, |
    |                      | overlapped with the product              | overlapped with the products                   |

    Source: paper, section 3, eq. 2; Korthikanti et al. 2022, section 4.2.2. Raises `LayoutError` if, under sequence
    parallelism, `x` has fewer than three dimensions.
    """
    require_sequence(x, mesh)
    if mesh.symmetric_memory:
        if adapter is not None:  # compute the sum of two products as one product of concatenated factors
            x, weight = torch.cat([x, adapter.low], -1), torch.cat([weight, adapter.up], -1)
        product = multiply_and_scatter(x, weight, mesh)
        return product if bias is None else product + bias
    if _is_alone(mesh):
        y = _sum_of_products(products, x, weight, *(adapter or (None, None)))
        return y if bias is None else add_owned(y, bias)
    return run(_MultiplyAndLeave, x, mesh, products, weight, bias, *(adapter or (None, None)))


def skip_and_leave(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    mesh: ParallelMesh,
    products: Products = ORDINARY,
    adapter: LowRank | None = None,
) -> Tensor:
    """Variant of `multiply_and_leave` for an output that no code reads. The forward pass returns zeros without
    multiplying or sending. The backward pass is that of `multiply_and_leave`.
    """
    require_sequence(x, mesh)
    return run(_SkipProduct, x, mesh, products, weight, bias, *(adapter or (None, None)))


class _LeaveContext(AutogradContext[tuple[Tensor, Tensor, Tensor | None, Tensor | None]], Protocol):
    mesh: ParallelMesh
    in_parts: bool
    products: Products
    has_bias: bool


class _MultiplyAndLeave(Function):
    """Autograd function of `multiply_and_leave`, without copies for g and for the bias."""

    @staticmethod
    def forward(ctx: _LeaveContext, x: Tensor, mesh: ParallelMesh, products: Products, *rest: Tensor | None) -> Tensor:
        weight, bias, low, up = rest
        assert weight is not None
        ctx.save_for_backward(x, weight, low, up)
        ctx.mesh, ctx.products, ctx.has_bias = mesh, products, bias is not None
        num = _num_pieces(x, mesh, products, x.shape[:-1].numel() * weight.shape[0])
        ctx.in_parts = in_parts = _leaves_in_parts(mesh, weight, low, num)
        pieces = _cut(x, num, mesh, in_parts)
        lows = [None] * num if low is None else _cut(low, num, mesh, in_parts)
        leaving = [
            start_sum(_sum_of_products(products, piece, weight, low, up), mesh, in_parts=in_parts)
            for piece, low in zip(pieces, lows, strict=True)
        ]
        done = [wait(piece, mesh.tensor) for piece in leaving]
        y = done[0] if len(done) == 1 else torch.cat(done)
        return y if bias is None else add_owned(y, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LeaveContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, low, up = ctx.saved_tensors
        mesh, products = ctx.mesh, ctx.products
        needs_x, _, _, needs_weight, needs_bias, needs_low, needs_up = ctx.needs_input_grad
        grad_bias = bias_gradient(grad) if ctx.has_bias and needs_bias else None
        pieces = _pieces(grad, mesh, products, grad.numel() * mesh.tensor.size)
        leaving = [start_gather(piece, mesh) for piece in pieces]
        factors = [(x, weight, needs_x, needs_weight)]
        if low is not None and up is not None:
            factors.append((low, up, needs_low, needs_up))
        if len(leaving) > 1:
            grads = _factor_gradients_in_pieces(leaving, mesh, factors, in_parts=ctx.in_parts)
        else:
            whole = finish_gather(leaving[0], mesh, in_parts=ctx.in_parts)
            if ctx.in_parts:
                factors = [(to_parts(factor[0], mesh), *factor[1:]) for factor in factors]
            grads = [_factor_gradients(products, whole, factor) for factor in factors]
            if ctx.in_parts:
                grads = [(None if x is None else from_parts(x, mesh), weight) for x, weight in grads]
        grad_low, grad_up = grads[1] if low is not None else (None, None)
        grad_x, grad_weight = grads[0]
        return grad_x, None, None, grad_weight, grad_bias, grad_low, grad_up


class _SkipProduct(_MultiplyAndLeave):
    """Autograd function of `skip_and_leave`. It returns zeros, and has the backward pass of `multiply_and_leave`."""

    @staticmethod
    def forward(ctx: _LeaveContext, x: Tensor, mesh: ParallelMesh, products: Products, *rest: Tensor | None) -> Tensor:
        weight, bias, low, up = rest
        assert weight is not None
        ctx.save_for_backward(x, weight, low, up)
        ctx.mesh, ctx.products, ctx.has_bias = mesh, products, bias is not None
        num = _num_pieces(x, mesh, products, x.shape[:-1].numel() * weight.shape[0])
        ctx.in_parts = _leaves_in_parts(mesh, weight, low, num)
        return x.new_zeros(*summed_shape(x, mesh), weight.shape[0])


def _leaves_in_parts(mesh: ParallelMesh, weight: Tensor, low: Tensor | None, num_pieces: int) -> bool:
    width = weight.shape[1] + (0 if low is None else low.shape[-1])
    return works_on_parts(mesh, inside=3 * width, sent=2 * weight.shape[0], keeps=num_pieces == 1)


def _cut(x: Tensor, num_pieces: int, mesh: ParallelMesh, in_parts: bool) -> Sequence[Tensor]:
    """Cut `x` [B, S, I] into pieces along the batch; with `in_parts`, into pieces of its parts [T B, S/T, I]."""
    return _chunks(to_parts(x, mesh, num_pieces) if in_parts else x, num_pieces)


def _sum_of_products(products: Products, x: Tensor, weight: Tensor, low: Tensor | None, up: Tensor | None) -> Tensor:
    """Compute X_i A_i, and add the product of an adapter if there is one."""
    product = products.output(x, weight)
    return product if low is None or up is None else add_owned(product, products.output(low, up))


_Factors = tuple[Tensor, Tensor, bool, bool]
"""The two factors of a product, and whether each factor needs a gradient."""


def _factor_gradients(products: Products, grad: Tensor, factors: _Factors) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both factors of a product, given the gradient `grad` of the product. The result has None
    for a factor that needs no gradient, and for a weight whose gradient is deferred.
    """
    x, weight, needs_x, needs_weight = factors
    return (
        products.input_gradient(grad, weight) if needs_x else None,
        _weight_gradient(products, grad, x, weight) if needs_weight else None,
    )


def _weight_gradient(products: Products, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """Return the gradient of a weight, or None if the gradient is deferred.

    The tensors that a deferred gradient keeps are detached. Otherwise, `x` would keep the autograd graph of its forward
    pass alive, including the input of the pipeline stage and the gradient of this input.
    """
    if products.deferral is not None:
        compute = partial(products.weight_gradient, grad.detach(), x.detach(), dtype=weight.dtype)
        if products.deferral.defer(compute, weight):
            return None
    return products.weight_gradient(grad, x, dtype=weight.dtype)


def _factor_gradients_in_pieces(
    leaving: Sequence[Tensor], mesh: ParallelMesh, factors: Sequence[_Factors], *, in_parts: bool
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return the gradients of the factors of several products. The forward pass added up these products. `leaving` is
    the gradient of their sum, in pieces along the batch, as `start_gather` returns them.
    """
    grads = [  # contiguous, even if x is not
        (x.new_empty(x.shape) if needs_x else None, torch.empty_like(weight) if needs_weight else None)
        for x, weight, needs_x, needs_weight in factors
    ]
    inputs = [_cut(x, len(leaving), mesh, in_parts) for x, *_ in factors]
    for i, piece in enumerate(leaving):
        whole = finish_gather(piece, mesh, in_parts=in_parts)
        for pieces, (_, weight, *_), (grad_x, grad_weight) in zip(inputs, factors, grads, strict=True):
            if grad_x is not None and in_parts:
                write_from_parts(grad_x.chunk(len(leaving))[i], ORDINARY.input_gradient(whole, weight), mesh)
            elif grad_x is not None:
                multiply_into(grad_x.chunk(len(leaving))[i], whole, weight.t())
            if grad_weight is not None:
                add_product(grad_weight, as_rows(whole).t(), as_rows(pieces[i]), is_first=i == 0)
    return grads


def _pieces(x: Tensor, mesh: ParallelMesh, products: Products, elements: int) -> Sequence[Tensor]:
    """Cut `x` into pieces along the batch, so that one piece is sent while another piece is multiplied."""
    return _chunks(x, _num_pieces(x, mesh, products, elements))


def _chunks(x: Tensor, num: int) -> Sequence[Tensor]:
    return [x] if num == 1 else x.chunk(num)  # a compiler takes a chunk for another tensor, and casts it again


def _num_pieces(x: Tensor, mesh: ParallelMesh, products: Products, elements: int) -> int:
    """Number of pieces into which `x` is cut along the batch.

    Without sequence parallelism, `x` stays whole, and f and g send one all-reduce each. For 8-bit products, `x` also
    stays whole, because otherwise each piece would be cast separately.
    """
    return num_pieces(x.shape[0], elements) if mesh.sequence_parallel and products is ORDINARY else 1


def _input_gradient(products: Products, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum the input gradients of several layers with the same input."""
    total: Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        total = products.input_gradient(grad, weight, total)
    assert total is not None
    return total
