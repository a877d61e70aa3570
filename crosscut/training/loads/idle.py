"""Search for experts that have collapsed: experts that get no tokens any more.

A batch of few tokens leaves out experts by chance. An expert counts as collapsed only if it had no row for many steps
in a row, and if an expert with the mean load would have had many rows in these steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.training.loads.step_loads import StepLoads, layer_of

LEAST_ROWS = 1000
"""Number of rows that an expert with the mean load would have had. An expert with 1% of the mean load has none of them
with a probability of e^-10."""
_MOST_NAMED = 8
"""Maximum number of experts of a layer that a message names. Further experts are only counted."""


class Collapse(NamedTuple):
    """An expert that has collapsed."""

    mixture: str
    """Name of the mixture, such as `blocks.1.mlp`."""
    expert: int
    steps: int
    """Number of steps in a row without a token."""

    @property
    def row(self) -> dict[str, int]:
        """Row of `metrics.jsonl`."""
        return {"idle_layer": int(self.mixture.split(".")[1]), "idle_expert": self.expert, "idle_steps": self.steps}


class IdleExperts:
    """Experts that got no tokens in the last steps of a run. An expert is named again only after it had a token.

    `least_steps` is `training.idle_expert_steps`: the number of steps without a token after which an expert is named.
    0 names none.
    """

    def __init__(self, least_steps: int) -> None:
        self.least_steps = least_steps
        self._steps: Tensor | None = None
        self._rows = self._told = torch.zeros(())

    def forget(self) -> None:
        """Count from zero again, because the run has rolled back."""
        self._steps = None

    def step(self, step: StepLoads) -> list[Collapse]:
        """Count a step. Return the experts that are to be named after it."""
        if not self.least_steps:
            return []
        idle = step.loads == 0
        if self._steps is None:
            self._steps, self._rows, self._told = torch.zeros_like(idle, dtype=torch.int64), idle * 0.0, idle & False
        self._steps = (self._steps + 1) * idle
        self._rows = (self._rows + step.loads.mean(1, keepdim=True)) * idle
        found = (self._steps >= self.least_steps) & (self._rows >= LEAST_ROWS) & ~self._told
        self._told = (self._told | found) & idle
        if not found.any():
            return []
        steps = self._steps
        return [Collapse(step.names[i], expert, int(steps[i, expert])) for i, expert in found.nonzero().tolist()]


def describe_collapses(step: int, found: Sequence[Collapse]) -> str:
    """Return the message about experts that have collapsed after `step` steps."""
    of_mixtures: dict[str, list[int]] = {}
    for each in found:
        of_mixtures.setdefault(each.mixture, []).append(each.expert)
    told = "; ".join(f"{_experts(experts)} of {layer_of(mixture)}" for mixture, experts in of_mixtures.items())
    return (
        f"step {step:>6}  collapse: {told}: no token for {min(each.steps for each in found):,} steps. In a new run, "
        "raise `model.experts.balance_loss`, or set model.experts.balance_bias=true."
    )


def _experts(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    return f"expert{'s' if len(numbers) > 1 else ''} {first}{more}"
