"""The table of axes. An axis is a direction along which a layout arranges ranks, and each axis has a role.

The role determines what ranks along the axis compute and store:

- Along some axes, ranks see different tokens (`splits_tokens`). A loss is normalised, and gradients are summed, over
  these axes.
- Ranks that see different tokens hold identical bits of every parameter, unless each rank stores a slice
  (`stores_slices`, and `joins_shards` if the layout shards the model). Along an axis that cuts parameters, ranks hold
  identical bits of the parameters that are not cut.
- The gradient norm counts every element once. For each parameter, the squares are summed over the axes that cut the
  parameter or store slices of it. The parameter's placement names these axes. The squares are also summed over axes
  along which each rank has its own parameters.
- Experts are folded: the ranks that see different tokens are arranged a second time, along `expert` and the axes that
  are left over (`expert_data`). The table has two plans over the same ranks, one for the parameters of experts and one
  for all others.
- A checkpoint holds every element once. The parameter's placement decides which rank writes an element.

Layouts, meshes, reductions, `crosscut verify` and the documentation use this table. An axis of size 1 has no process
group and no messages, unless the axis is permanent (`is_permanent`). The ranks along the tensor axis are adjacent, as
in the paper's Figure 5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from crosscut.config.checks import divisors


class AxisRole(StrEnum):
    """Role of an axis: the way in which the ranks along the axis differ."""

    OWNS = "owns parameters"
    """Each rank has parameters that the other ranks do not have."""
    TOKENS = "tokens"
    """Each rank has its own tokens, and all ranks use the same parameters."""
    CUTS = "cuts parameters"
    """Each rank has a part of every large matrix and a copy of every small parameter, and all ranks see the same
    tokens."""


@dataclass(frozen=True, kw_only=True)
class AxisRow:
    """One row of the table of parallel axes: the properties of one axis."""

    name: str
    option: str
    """Field of `Layout` that sets the size of the axis. Several axes can share a field. The value of the field is then
    the product of the axes' sizes. A derived axis has no field, and `option` names the axes that are derived
    together."""
    shares: str
    """Phrase for messages and documentation: the thing that the ranks along the axis share."""
    role: AxisRole
    splits_batch: bool = False
    """Whether ranks along the axis read different sequences of a batch."""
    stores_slices: bool = False
    """Whether each rank stores a slice of every parameter, and gathers the slices of the other ranks to use the
    parameter."""
    is_folded: bool = False
    """Whether the axis reuses the ranks that see different tokens, so that it does not multiply the number of ranks.
    Folded axes belong to the plan of the experts' parameters (`ranks.RankPlan`)."""
    is_derived: bool = False
    """Whether the size of the axis follows from the sizes of other axes."""
    is_permanent: bool = False
    """Whether meshes and descriptions include the axis even at size 1."""
    joins_shards: bool = False
    """Whether the ranks along this axis belong to the shard group if `layout.sharding` is set. Each of these ranks then
    stores a slice of every parameter."""
    is_planned: bool = True
    """Whether `crosscut plan` proposes sizes of the axis."""

    @property
    def splits_tokens(self) -> bool:
        """Whether ranks along the axis see different tokens. If so, losses, counts and gradients are summed over the
        axis.
        """
        return self.role is AxisRole.TOKENS

    @property
    def cuts_parameters(self) -> bool:
        """Whether each rank computes with its own part of a parameter. Experts are stacked in one parameter, of which
        each rank has some.
        """
        return self.role is AxisRole.CUTS or (self.role is AxisRole.OWNS and self.is_folded)


AXES = (
    AxisRow(name="pipeline", option="pipeline", shares="the model's layers, in stages", role=AxisRole.OWNS),
    AxisRow(name="replica", option="data", shares="the batch", role=AxisRole.TOKENS,
            splits_batch=True, is_permanent=True),
    AxisRow(name="shard", option="data", shares="the batch", role=AxisRole.TOKENS,
            splits_batch=True, stores_slices=True, is_permanent=True),
    AxisRow(name="context", option="context", shares="each sequence", role=AxisRole.TOKENS,
            joins_shards=True, is_planned=False),
    AxisRow(name="expert_replica", option="expert_data", shares="the tokens of each expert", role=AxisRole.TOKENS,
            is_folded=True, is_derived=True, is_permanent=True),
    AxisRow(name="expert_shard", option="expert_data", shares="the tokens of each expert", role=AxisRole.TOKENS,
            stores_slices=True, is_folded=True, is_derived=True, is_permanent=True),
    AxisRow(name="expert", option="expert", shares="the experts of a layer", role=AxisRole.OWNS,
            is_folded=True),
    AxisRow(name="tensor", option="tensor", shares="each matrix: columns, rows, heads, vocabulary", role=AxisRole.CUTS,
            is_permanent=True),
)  # fmt: skip
"""All axes, outermost first."""

OPTIONS = {
    option: tuple(rows)
    for option, rows in groupby((row for row in AXES if not row.is_derived), key=lambda row: row.option)
}
"""Rows of `AXES`, keyed by the field of `Layout` that sets the size of the axis. If several axes share a field, the
outermost axis comes first. Derived axes are left out."""


_ROLES = {name: row.role for row in AXES for name in (row.name, row.option)}
_CUTTING = {name for row in AXES for name in (row.name, row.option) if row.cuts_parameters}
_FOLDED = {name for row in AXES for name in (row.name, row.option) if row.is_folded}


def role_of(name: str) -> AxisRole:
    """Return the role of an axis. `name` is the name of the axis, or the `option` of its row. All axes that share an
    option have the same role.
    """
    return _ROLES[name]


def cuts_parameters(name: str) -> bool:
    """Whether ranks along an axis compute with different parts of a parameter (`AxisRow.cuts_parameters`). `name` is
    the name of the axis, or the `option` of its row.
    """
    return name in _CUTTING


def is_folded(name: str) -> bool:
    """Whether an axis reuses the ranks of other axes (`AxisRow.is_folded`). `name` is the name of the axis, or the
    `option` of its row.
    """
    return name in _FOLDED


def arrangements(num_ranks: int) -> Iterator[dict[str, int]]:
    """Yield all ways to arrange `num_ranks` ranks along the axes for which `crosscut plan` proposes sizes. Each result
    maps the fields of `Layout` to sizes whose product is `num_ranks`. In a result, the innermost axis comes first. The
    results are in ascending order of the innermost axis's size.
    """
    options = [name for name, (row, *_) in OPTIONS.items() if row.is_planned and not row.is_folded]
    return _arranged(num_ranks, options[::-1])


def _arranged(num_ranks: int, options: list[str]) -> Iterator[dict[str, int]]:
    option, *others = options
    if not others:
        yield {option: num_ranks}
        return
    for size in divisors(num_ranks):
        yield from ({option: size, **rest} for rest in _arranged(num_ranks // size, others))
