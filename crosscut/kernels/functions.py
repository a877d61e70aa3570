"""Calls of functions: the interface by which layers call them, and autograd functions without overhead in inference."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function


class Call(Protocol):
    """Function that calls another function and returns its result: directly, as compiled code, or again in the backward
    pass.
    """

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `function(*inputs)`, differentiable as usual."""


def call(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call the function directly."""
    return function(*inputs)


class _Forgetful:
    """Context for a forward pass without a backward pass. It discards the tensors that would be saved."""

    def save_for_backward(self, *_tensors: object) -> None:
        """Discard the tensors."""


def run(function: type[Function], *arguments: Any, twin: Callable[..., Any] | None = None) -> Any:
    """Return `function.apply(*arguments)`, or only its forward pass if gradients are off.

    `twin` computes the same with PyTorch's own operators. A compiler traces the twin instead of the function.

    The overhead of `apply` takes longer than multiplying a single token by a small matrix. In addition, a compiler that
    traces a function with a variable number of arguments and no backward pass may mistake its context for a tensor.
    """
    if twin is not None and torch.compiler.is_compiling():  # the compiler fuses, and decides what to keep, by itself
        return twin(*arguments)
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Forgetful(), *arguments)


def add_owned(total: Tensor, more: Tensor) -> Tensor:
    """Return the sum, stored in the memory of `total`. The caller must hold the only reference to `total`."""
    # If a result was changed in place, PyTorch 2.11 compiles it without a gradient and gives no warning.
    return total + more if torch.compiler.is_compiling() else total.add_(more)
