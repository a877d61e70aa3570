"""Sums that layers return beside the residual stream, such as a loss that balances experts."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from crosscut.architecture.inputs import LossTerm


class Sums(NamedTuple):
    """Sums of one layer, or of one sublayer, in one micro-batch. Both are empty if gradients are off."""

    terms: dict[str, Tensor]
    """Terms of the loss: scalars with a gradient, by the terms' names. A term is a sum over the rank's tokens."""
    figures: dict[str, Tensor]
    """Vectors without a gradient. The names are those of the description; a layer adds the part's name and a dot."""


NO_SUMS = Sums({}, {})
"""Sums of a sublayer that returns none."""


def joined(parts: Mapping[str, Sums]) -> Sums:
    """Return the sums of a layer, given those of its parts by the parts' names."""
    if not parts:
        return NO_SUMS
    terms: dict[str, Tensor] = {}
    for sums in parts.values():
        terms = _added(terms, sums.terms)
    return Sums(terms, {f"{part}.{name}": x for part, sums in parts.items() for name, x in sums.figures.items()})


class LayerSums:
    """Sums of all layers of a rank and of all micro-batches of a step."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        """Sums of the terms over layers and micro-batches, without gradients."""
        self.figures: dict[tuple[int, str, str], Tensor] = {}
        """Sums of the figures over micro-batches, by the index of the layer, the name of the part and the name of the
        figure."""
        self._terms: dict[str, Tensor] = {}

    def add(self, layer: int, sums: Sums) -> None:
        """Add the sums of a layer, right after its forward pass. The backward pass of a term then comes to a layer when
        the layer's own backward pass begins, so that sharded weights are gathered one layer after the other.
        """
        self._terms = _added(self._terms, sums.terms)
        for name, figure in sums.figures.items():
            part, _, of_part = name.rpartition(".")
            key = (layer, part, of_part)
            self.figures[key] = self.figures[key] + figure if key in self.figures else figure

    def taken(self, terms: Iterable[LossTerm], scales: Mapping[str, float | Tensor]) -> Tensor | None:
        """Return the sum of the terms that have been added since the last call, each times its factor: a scalar. None
        if there are no terms. Only terms with a factor in `scales` count: an evaluation has none.
        """
        added, self._terms = self._terms, {}
        self.totals = _added(self.totals, {name: term.detach() for name, term in added.items()})
        found = [added[term.name] * scales[term.name] for term in terms if term.name in added and term.name in scales]
        return sum(found[1:], found[0]) if found else None


def _added(totals: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    if not more:
        return totals
    return totals | {name: totals[name] + each if name in totals else each for name, each in more.items()}
