"""Plan of ranks: questions about the ranks of a layout, answered by the roles of the axes (`axes.AXES`).

The model, the planner, the mesh and the proof ask the plan over which ranks a gradient is summed, which ranks hold the
same bits, and which ranks cut, store or own parameters. The code that asks names no axis. Ranks that differ only in
their position along some axes form a line. A line may join several axes: the ranks that see different tokens differ
along `replica`, `shard` and `context`.

A plan holds rows of the table and their sizes, whose product is the number of ranks. Rows that reuse the ranks of other
rows belong to another plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from crosscut.config.axes import AxisRole, AxisRow


@dataclass(frozen=True)
class Line:
    """Ranks that differ only in their position along one axis, or along several axes that count as one."""

    name: str
    """Name that messages along this line carry."""
    axes: tuple[str, ...]
    """Names of the device mesh's axes that have several ranks on this line, outermost first."""
    size: int
    stride: int
    """Difference between the numbers of two neighbouring ranks."""


@dataclass(frozen=True)
class RankPlan:
    """Lines of ranks, by the role of the axes.

    Each of the lines `tokens`, `batch`, `slices`, `copies`, `cuts` and `owners` answers a question. A line of one rank
    sends no messages.
    """

    rows: tuple[AxisRow, ...]
    """Axes whose sizes multiply to the number of ranks, outermost first."""
    sizes: Mapping[str, int]
    """Number of ranks along each axis, keyed by the axis's name."""
    shards: bool
    """Whether the layout shards gradients and optimizer state."""

    @cached_property
    def tokens(self) -> Line:
        """Ranks that see different tokens. Losses, counts and gradients are summed over these ranks."""
        return self._line_of(lambda row: row.splits_tokens)

    @cached_property
    def batch(self) -> Line:
        """Ranks that read different sequences of a batch."""
        return self._line_of(lambda row: row.splits_batch)

    @cached_property
    def slices(self) -> Line:
        """Ranks that each store a slice of every parameter, and together one copy of the model."""
        return self._line_of(self.stores_slices)

    @cached_property
    def copies(self) -> Line:
        """Ranks that see different tokens and hold the same bits of every parameter."""
        return self._line_of(self.holds_copies)

    @cached_property
    def cuts(self) -> Line:
        """Ranks that cut parameters, and hold the same bits of the parameters that are not cut."""
        return self._line_of(lambda row: row.role is AxisRole.CUTS)

    @cached_property
    def owners(self) -> Line:
        """Ranks that each have parameters of their own. The norm of the gradients counts the parameters of all."""
        return self._line_of(lambda row: row.role is AxisRole.OWNS)

    @cached_property
    def per_owner(self) -> int:
        """Number of adjacent ranks that hold the same parameters, whole or in parts: the model or, in a pipeline, the
        same stages.
        """
        return prod(self.sizes[row.name] for row in self.rows) // self.owners.size

    def line(self, name: str) -> Line:
        """Return the line with this name: an axis, a field of `Layout`, or a line that joins several axes. The first
        and the last rank of a pipeline (`ends`) are ranks of the pipeline's line.
        """
        return self._lines[name]

    def holds_copies(self, row: AxisRow) -> bool:
        """Whether ranks along an axis hold the same bits of every parameter."""
        return row.splits_tokens and not self.stores_slices(row)

    def stores_slices(self, row: AxisRow) -> bool:
        """Whether ranks along an axis each store a slice of every parameter."""
        return row.stores_slices or (row.joins_shards and self.shards)

    @cached_property
    def _lines(self) -> dict[str, Line]:
        together = {row.option: [each for each in self.rows if each.option == row.option] for row in self.rows}
        named = {**together, **{row.name: [row] for row in self.rows}}
        lines = {name: self._line_of(rows.__contains__) for name, rows in named.items()}
        joined = {line.name: line for line in (self.tokens, self.slices) if line.size > 1}
        return {**lines, **joined, "ends": self.owners}

    def _line_of(self, has_role: Callable[[AxisRow], bool]) -> Line:
        """Return the line of the axes with this role. If it joins axes whose sizes several fields of `Layout` set, it
        is called `shard` if its ranks store slices of one copy, and `tokens` if not.
        """
        mine = [row for row in self.rows if has_role(row)]
        in_use = [row for row in mine if self.sizes[row.name] > 1]
        options = list(dict.fromkeys(row.option for row in in_use or mine[:1]))
        axes = tuple(dict.fromkeys(self._mesh_axis(row) for row in in_use))
        joined = "shard" if all(self.stores_slices(row) for row in in_use) else "tokens"
        name = joined if len(options) > 1 else axes[0] if len(axes) == 1 else options[0]
        size = prod(self.sizes[row.name] for row in mine)
        return Line(name, axes, size, self._strides[mine[-1].name])

    def _mesh_axis(self, row: AxisRow) -> str:
        """Name of the device mesh's axis that an axis belongs to. If only one of the axes that share a field of
        `Layout` has several ranks, these axes are one axis of the mesh, which has the name of the field.
        """
        together = [each for each in self.rows if each.option == row.option]
        return row.name if all(self.sizes[each.name] > 1 for each in together) else row.option

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Difference between the numbers of two neighbouring ranks along each axis, keyed by the axis's name: the
        product of the sizes of all axes inside that axis.
        """
        strides, inside = {}, 1
        for row in reversed(self.rows):
            strides[row.name] = inside
            inside *= self.sizes[row.name]
        return strides
