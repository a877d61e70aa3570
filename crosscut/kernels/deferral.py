"""Deferral of weight gradients: a backward pass computes only the gradients of activations, and the gradients of
weights are computed later.

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
    """Deferred gradient of one weight."""

    compute: Callable[[], Tensor]
    edge: GradientEdge
    """Edge of the autograd graph at which the gradient enters the graph. From there, autograd passes the gradient on to
    the parameter.
    """


class Deferred:
    """Weight gradients that a backward pass has deferred and that still have to be computed."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def add(self, compute: Callable[[], Tensor], edge: GradientEdge) -> None:
        """Add a deferred gradient. `compute` computes the gradient, which then enters the autograd graph at `edge`."""
        self._waiting.append(_Waiting(compute, edge))

    def __len__(self) -> int:
        """Return the number of gradients that still have to be computed."""
        return len(self._waiting)

    def compute(self) -> int:
        """Compute the deferred gradients in the order of the backward pass, and add them to the `.grad` of the
        parameters. Return the number of gradients.
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
    """Switch for deferring weight gradients, shared by all linear layers of a model. Inside the context `collecting`,
    backward passes defer the gradients of weights. Outside this context, backward passes compute them immediately.
    """

    def __init__(self) -> None:
        self._current: Deferred | None = None

    @contextmanager
    def collecting(self) -> Iterator[Deferred]:
        """Context in which backward passes do not compute the weight gradients of the linear layers, but defer them.
        The context yields the `Deferred` that collects these gradients.
        """
        self._current = Deferred()
        try:
            yield self._current
        finally:
            self._current = None

    def defer(self, compute: Callable[[], Tensor], weight: Tensor) -> bool:
        """Defer the gradient of `weight`, to be computed later by a call of `compute`. Return true if the gradient is
        deferred (inside the context `collecting`), and false otherwise.

        Call this method in the backward pass of an autograd function that has saved `weight`.
        """
        if self._current is None:
            return False
        # Unlike an edge from `next_functions`, this edge keeps the nodes behind the weight alive, as torch 2.11 needs.
        self._current.add(compute, get_gradient_edge(weight))
        return True
