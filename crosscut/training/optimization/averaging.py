"""Exponential moving average (EMA) of the weights, with which a model is evaluated (Polyak and Juditsky 1992).

After step n, counted from 0, the average A of a weight W changes by

    A <- d A + (1 - d) W,   d = min(ema_decay, (1 + n) / (10 + n))

At first, A is equal to the initial weights. The second term of the minimum is the warm-up of the decay, as in
TensorFlow's `tf.train.ExponentialMovingAverage` with `num_updates`. Until d reaches `ema_decay`, the average covers
about the last tenth of the steps so far. An average with a constant decay of 0.999 would still contain 37% of the
initial weights after 1,000 steps. With the warm-up, their share is below 1e-20.

The average is sharded like the parameters, so each rank updates its own part and sends nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crosscut.parallel import reshard
from crosscut.parallel.state.parameters import local_part

SCORED = "of the averaged weights"
"""Phrase that says that a score or a generated sample comes from the averaged weights."""

WARMUP = 10
"""Constant of the warm-up: after n steps, the decay is at most (1 + n) / (WARMUP + n)."""


def decay_after(step: int, decay: float) -> float:
    """Return the decay of the average after step `step`, counted from 0: at most `decay` (`optimizer.ema_decay`)."""
    return min(decay, (1 + step) / (WARMUP + step))


class WeightAverage:
    """Moving average of a model's parameters. Each rank holds its own part, in the element type of the parameters.

    At its first use, the average is set to the model's weights. The model may therefore get its initial weights after
    this object was created.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Create the average. `decay` is the maximum decay, at least 0 and below 1."""
        self.model, self.decay = model, decay
        reshard(model)
        self._parameters = list(model.parameters())
        self.tensors = {name: torch.zeros_like(p, requires_grad=False) for name, p in model.named_parameters()}
        """Average of each parameter, keyed by the parameter's name and distributed like the parameter. The values are
        valid only if `has_begun` is true."""
        self.has_begun = False

    @torch.no_grad()
    def begin(self) -> None:
        """Set the average to the current weights, unless the average has already begun. Call this method before the
        optimizer's first step.
        """
        if not self.has_begun:
            torch._foreach_copy_(*self._parts())
            self.has_begun = True

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after step `step`, counted from 0. The average must have begun.

        Call this method after the optimizer's step. (The optimizer's step waits until a checkpoint in progress has
        copied the average.) If the step has not changed the weights, for example because of an overflow in float16, the
        average is updated with the unchanged weights.
        """
        assert self.has_begun, "the average begins before the first step"
        torch._foreach_lerp_(*self._parts(), 1 - decay_after(step, self.decay))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Swap the weights and the average inside the context, so that the model computes with the average. After the
        context, the weights and the average have their old values, bit for bit. The optimizer must not step inside the
        context.
        """
        self.begin()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self.model)  # gathered copies hold the old values
        for average, weight in zip(*self._parts(), strict=True):
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)

    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's part of each average, and of each parameter."""
        return [local_part(each) for each in self.tensors.values()], [local_part(p) for p in self._parameters]
