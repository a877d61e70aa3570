"""Deferral of weight gradients: a backward pass computes the gradients of activations, and the gradients of weights
follow later.

Other pipeline stages wait for the gradients of activations, but no stage waits for the gradients of weights. A schedule
that computes the latter later lets the other stages start earlier (Qi et al. 2023, arXiv 2401.10241).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class _Waiting(NamedTuple):
    """Gradient of one weight that is still to be computed."""

    compute: Callable[[], Tensor]
    edge: GradientEdge
    """Place in the autograd graph at which the gradient belongs. From there, autograd passes it on to the parameter."""


class Deferred:
    """Weight gradients of one backward pass that are still to be computed."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def add(self, compute: Callable[[], Tensor], edge: GradientEdge) -> None:
        """Add a gradient."""
        self._waiting.append(_Waiting(compute, edge))

    def __len__(self) -> int:
        """Number of gradients that are still to be computed."""
        return len(self._waiting)

    def compute(self) -> None:
        """Compute the gradients and add them to the `.grad` of the parameters, in the order of the backward pass."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:  # frees the tensors of each gradient before the next one
            compute, edge = waiting.pop()
            with torch.no_grad():
                gradient = compute()
            torch.autograd.backward([edge], [gradient])


class Deferral:
    """Switch of the deferral, which the linear layers of a model share. It is off outside of `collecting`."""

    def __init__(self) -> None:
        self._current: Deferred | None = None

    @contextmanager
    def collecting(self) -> Iterator[Deferred]:
        """Context in which a backward pass puts off the gradients of the linear layers' weights, and collects them in
        the `Deferred` of the context.
        """
        self._current = Deferred()
        try:
            yield self._current
        finally:
            self._current = None

    def takes(self, compute: Callable[[], Tensor], weight: Tensor) -> bool:
        """Whether the deferral is on. If so, it takes over to compute the gradient of `weight`, a tensor that the
        autograd function whose backward pass runs has saved.
        """
        if self._current is None:
            return False
        # Unlike the `next_functions` of the function, this edge keeps the nodes behind the weight alive (torch 2.11).
        self._current.add(compute, get_gradient_edge(weight))
        return True
