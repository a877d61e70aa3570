"""Deferral of weight gradients: a backward pass computes the gradients of activations, and the gradients of weights
follow later.

Other pipeline stages wait for the gradients of activations, but no stage waits for the gradients of weights. A schedule
that defers the gradients of weights lets the other stages start earlier (Qi et al. 2023, arXiv 2401.10241).
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
    """Edge of the autograd graph at which the gradient enters. From there, autograd passes the gradient on to the
    parameter.
    """


class Deferred:
    """Weight gradients of one backward pass that are still to be computed."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def add(self, compute: Callable[[], Tensor], edge: GradientEdge) -> None:
        """Add a gradient, which `compute` computes and which enters the autograd graph at `edge`."""
        self._waiting.append(_Waiting(compute, edge))

    def __len__(self) -> int:
        """Number of gradients that are still to be computed."""
        return len(self._waiting)

    def compute(self) -> int:
        """Compute the gradients and add them to the `.grad` of the parameters, in the order of the backward pass.
        Return the number of computed gradients.
        """
        computed = 0
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:  # `pop` frees the tensors of a gradient before the next gradient is computed
            compute, edge = waiting.pop()
            with torch.no_grad():
                gradient = compute()
            torch.autograd.backward([edge], [gradient])
            computed += 1
        return computed


class Deferral:
    """Switch that the linear layers of a model share. Gradients of weights are deferred inside the context
    `collecting`, and computed at once outside of it.
    """

    def __init__(self) -> None:
        self._current: Deferred | None = None

    @contextmanager
    def collecting(self) -> Iterator[Deferred]:
        """Context in which a backward pass does not compute the gradients of the linear layers' weights, but adds them
        to the `Deferred` that the context yields.
        """
        self._current = Deferred()
        try:
            yield self._current
        finally:
            self._current = None

    def defer(self, compute: Callable[[], Tensor], weight: Tensor) -> bool:
        """Defer the gradient of `weight`, which `compute` computes. Returns false, without deferring, outside of
        `collecting`.

        The method is called in the backward pass of an autograd function that has saved `weight`.
        """
        if self._current is None:
            return False
        # Unlike an edge from `next_functions`, this edge keeps the nodes behind the weight alive, as torch 2.11 needs.
        self._current.add(compute, get_gradient_edge(weight))
        return True
