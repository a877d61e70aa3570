"""Autograd functions, called so that they cost nothing where nobody asks for a gradient."""

from typing import Any

import torch
from torch.autograd import Function


class _Forgetful:
    """Takes what a forward pass keeps for its backward pass, and lets it go."""

    def save_for_backward(self, *_tensors: object) -> None:
        """Keep nothing."""


def run(function: type[Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`, or its forward pass alone where no gradient is asked for.

    What `apply` does around a forward pass takes longer than the product of a single token with a small matrix. And a
    compiler that traces one with any number of arguments, and no backward pass, may take its context for a tensor.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Forgetful(), *arguments)
