"""Calls of functions: how a layer is told to call them, and autograd functions that cost nothing without a gradient."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function


class Call(Protocol):
    """Calls a function and returns its result: at once, from compiled code, or again in the backward pass."""

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `function(*inputs)`, with its gradients."""


def call(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call the function and do nothing else."""
    return function(*inputs)


class _Forgetful:
    """Takes what a forward pass keeps for its backward pass, and lets it go."""

    def save_for_backward(self, *_tensors: object) -> None:
        """Keep nothing."""


def run(function: type[Function], *arguments: Any, twin: Callable[..., Any] | None = None) -> Any:
    """`function.apply(*arguments)`, or its forward pass alone where no gradient is asked for.

    `twin` computes the same with PyTorch's own operators. A compiler traces the twin instead of the function.

    What `apply` does around a forward pass takes longer than the product of a single token with a small matrix. And a
    compiler that traces one with any number of arguments, and no backward pass, may take its context for a tensor.
    """
    if twin is not None and torch.compiler.is_compiling():  # a compiler fuses and chooses what to keep by itself
        return twin(*arguments)
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Forgetful(), *arguments)


def add_owned(total: Tensor, more: Tensor) -> Tensor:
    """Sum of both, in the memory of `total`, which was just made and is held by nobody else."""
    # PyTorch 2.11 compiles a result that was changed in place to one without a gradient, and does not say so.
    return total + more if torch.compiler.is_compiling() else total.add_(more)
