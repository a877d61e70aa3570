"""Loads of the experts and entropies of the routers in one step."""

import re
from typing import NamedTuple

from torch import Tensor


class StepLoads(NamedTuple):
    """Loads and entropies in each of L mixtures of E experts, over all ranks and micro-batches of a step."""

    names: tuple[str, ...]
    """Names of the mixtures, such as `blocks.1.mlp`."""
    table: Tensor
    """For each mixture, the number of rows of each expert and, last, the mean entropy of a token's scores in nats [L, E
    + 1]."""

    @property
    def loads(self) -> Tensor:
        """Number of rows of each expert [L, E]."""
        return self.table[:, :-1]

    @property
    def entropies(self) -> Tensor:
        """Mean entropy of a token's scores, in nats [L]."""
        return self.table[:, -1]


def layer_of(name: str) -> str:
    """Return the layer of a mixture in words. `name` is the name of the mixture, such as `blocks.1.mlp`."""
    found = re.fullmatch(r"blocks\.(\d+)\.(\w+)", name)
    if found is None:
        return name
    return f"layer {found[1]}" if found[2] == "mlp" else f"layer {found[1]} ({found[2]})"
