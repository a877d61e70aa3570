"""Table of axes: the directions along which a layout arranges ranks, outermost first, and the role of each.

The role of an axis determines everything else about it:

- A loss is normalised, and gradients are summed, over the axes of tokens (`splits_tokens`).
- Ranks hold identical bits of every parameter along the axes of tokens, except where each rank stores a slice
  (`holds_copies`); along an axis that cuts parameters they hold identical bits of the parameters that it does not cut.
- The gradient norm counts every element once: its squares are summed over the axes that cut a parameter or store slices
  of it, which the parameter's placement names, and over the axes that own parameters.
- A checkpoint holds every element once, by the same placement.

Layouts, meshes, sums, the proof and the documentation read this table. An axis of size 1 has no process group and no
messages, unless it is permanent. Tensor groups are adjacent ranks, as in the paper's Figure 5.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby


class Role(StrEnum):
    """Split that an axis makes between its ranks."""

    OWNS = "owns parameters"
    """Each rank has parameters that the others lack."""
    TOKENS = "tokens"
    """Each rank has its own tokens, and all ranks use the same parameters."""
    CUTS = "cuts parameters"
    """Each rank has a part of every large matrix and a copy of every small parameter, and all ranks see the same
    tokens."""


@dataclass(frozen=True, kw_only=True)
class AxisRow:
    """Row of the table."""

    name: str
    option: str
    """Field of `Layout` that gives the size; the rows of one field share it, and multiply to it."""
    shares: str
    """Thing that the ranks along the axis share, in words for messages and documentation."""
    role: Role
    stores_slices: bool = False
    """Whether each rank stores a slice of every parameter, and gathers the others' slices to use it."""
    is_folded: bool = False
    """Whether the axis consists of ranks of other axes, so that it does not multiply the number of ranks."""
    is_permanent: bool = False
    """Whether meshes and descriptions have the axis at size 1, too."""
    is_supported: bool = True
    """Whether the axis may be larger than 1."""

    @property
    def splits_tokens(self) -> bool:
        """Whether ranks along the axis see different tokens: losses, counts and gradients are summed over them."""
        return self.role is Role.TOKENS

    @property
    def holds_copies(self) -> bool:
        """Whether ranks along the axis hold the same bits of every parameter."""
        return self.role is Role.TOKENS and not self.stores_slices


AXES = (
    AxisRow(
        name="pipeline",
        option="pipeline",
        shares="the model's layers, in stages",
        role=Role.OWNS,
        is_supported=False,
    ),
    AxisRow(name="replica", option="data", shares="the batch", role=Role.TOKENS, is_permanent=True),
    AxisRow(name="shard", option="data", shares="the batch", role=Role.TOKENS, stores_slices=True, is_permanent=True),
    AxisRow(name="context", option="context", shares="each sequence", role=Role.TOKENS, is_supported=False),
    AxisRow(
        name="tensor",
        option="tensor",
        shares="each matrix: columns, rows, heads, vocabulary",
        role=Role.CUTS,
        is_permanent=True,
    ),
    AxisRow(
        name="expert",
        option="expert",
        shares="the experts of a layer",
        role=Role.OWNS,
        is_folded=True,
        is_supported=False,
    ),
)
"""All axes, outermost first."""

OPTIONS = {option: tuple(rows) for option, rows in groupby(AXES, key=lambda row: row.option)}
"""Rows of each size that a layout has, by its field, outermost first."""


_ROLES = {name: row.role for row in AXES for name in (row.name, row.option)}


def role_of(name: str) -> Role:
    """Role of an axis by its name, or by the name of its field, whose rows have one role."""
    return _ROLES[name]
