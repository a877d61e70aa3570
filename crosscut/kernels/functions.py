"""Interfaces through which layers call functions (`Caller`) and are called (`LayerCaller`), the typed context of
autograd functions (`AutogradContext`), and a fast way to call autograd functions in inference.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

_T = TypeVar("_T")
_Saved = TypeVar("_Saved")


class Caller(Protocol):
    """Function that calls another function: directly, as compiled code, or with recomputation in the backward pass."""

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `function(*inputs)`. Autograd can differentiate the result."""


class LayerCaller(Protocol):
    """Function that calls a layer, which may return more than a tensor, as a `Caller` calls other functions."""

    def __call__(self, function: Callable[..., _T], *inputs: Any) -> _T:
        """Return `function(*inputs)`. Autograd can differentiate the result."""


def call(function: Callable[..., _T], *inputs: object) -> _T:
    """Return `function(*inputs)`, called directly. This is the default `Caller`."""
    return function(*inputs)


class AutogradContext(Protocol[_Saved]):
    """Context `ctx` of an autograd function, for type checkers. The type argument is the tuple of the saved tensors. A
    function that keeps other values, too, declares them in a subclass.
    """

    saved_tensors: _Saved
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward pass."""


class _Forgetful:
    """Substitute for the context of an autograd function, used if there is no backward pass. It discards the tensors
    that the function saves.
    """

    def save_for_backward(self, *_tensors: object) -> None:
        """Discard the tensors."""


def run(function: type[Function], *arguments: object, twin: Callable[..., _T] | None = None) -> _T:
    """Return `function.apply(*arguments)`. If gradients are off, call only `function.forward`, without `apply`.

    `twin` computes the same result with PyTorch's own operators. `torch.compile` traces the twin instead of the
    function.

    If gradients are off, there are two reasons to avoid `apply`. First, the overhead of `apply` takes longer than the
    product of a single token and a small matrix. Second, if a function takes a variable number of arguments and has no
    backward pass, a compiler may mistake the function's context for a tensor.
    """
    if twin is not None and torch.compiler.is_compiling():  # the compiler decides what to fuse and save
        return twin(*arguments)
    result: _T = function.apply(*arguments) if torch.is_grad_enabled() else function.forward(_Forgetful(), *arguments)
    return result


def wide_in_compiled_code(x: Tensor) -> Tensor:
    """Return `x` in float32 in compiled code, and `x` itself otherwise. A compiler fuses the cast with the next
    operator. Without a compiler, the cast would be a separate pass over the memory.
    """
    return x.float() if torch.compiler.is_compiling() else x


def add_owned(total: Tensor, more: Tensor) -> Tensor:
    """Return `total` + `more`. The sum reuses the memory of `total`, except in compiled code. The caller must hold the
    only reference to `total`.
    """
    # If compiled code changes a result in place, PyTorch 2.11 loses the result's gradient and gives no warning.
    return total + more if torch.compiler.is_compiling() else total.add_(more)
