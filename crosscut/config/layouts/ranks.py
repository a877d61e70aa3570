"""Plan of ranks: questions about the ranks of a layout, answered by the roles of the axes (`axes.AXES`).

The model, the planner, the mesh and the proof ask the plan over which ranks a gradient is summed, which ranks hold the
same bits, and which ranks cut, store or own parameters. The code that asks names no axis. Ranks that differ only in
their position along some axes form a line. A line may join several axes: the ranks that see different tokens differ
along `replica`, `shard` and `context`.

A plan holds rows of the table and their sizes, whose product is the number of ranks. There are two plans over the same
ranks: one for the parameters of experts, with the folded axes, and one for all other parameters. With one expert rank,
experts are parameters like all others, and both plans are one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from crosscut.config.axes import AXES, AxisRole, AxisRow

DENSE_ROWS = tuple(row for row in AXES if not row.is_folded)
"""Axes of the plan of all parameters that are not experts, outermost first."""
EXPERT_ROWS = tuple(row for row in AXES if row.is_folded or not row.splits_tokens)
"""Axes of the plan of the experts, outermost first. The folded axes replace the axes along which tokens differ."""


@dataclass(frozen=True)
class Line:
    """Ranks that differ only in their position along one axis, or along several axes that count as one."""

    name: str
    """Name that messages along this line carry."""
    axes: tuple[str, ...]
    """Names of the device mesh's axes that have several ranks on this line, outermost first."""
    steps: tuple[tuple[int, int], ...]
    """Number of ranks along each axis, and the difference between the numbers of two neighbouring ranks. Adjacent axes
    count as one."""

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for size, _ in self.steps)

    @property
    def stride(self) -> int:
        """Difference between the numbers of two neighbouring ranks along the innermost axes."""
        return self.steps[-1][1]

    def place_of(self, rank: int) -> int:
        """Position of a rank on its line, from 0."""
        place = 0
        for size, stride in self.steps:
            place = place * size + rank // stride % size
        return place


@dataclass(frozen=True, eq=False)
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
    def cut_axes(self) -> tuple[str, ...]:
        """Names of the device mesh's axes that may cut a parameter of this plan, outermost first. A rank computes with
        its own part.
        """
        rows = [row for row in self.rows if row.cuts_parameters]
        return tuple(self._mesh_axis(row) for row in rows if self._mesh_axis(row) in self.mesh_axes)

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

    @cached_property
    def mesh_axes(self) -> dict[str, int]:
        """Number of ranks along each axis of the device mesh, keyed by the axis's name, outermost first.

        The mesh has the axes that have several ranks or are permanent. Axes that share a field of `Layout` are one axis
        of the mesh, unless each of them is needed.
        """
        mesh: dict[str, int] = {}
        for option, rows in self._together.items():
            sizes = {row.name: self.sizes[row.name] for row in rows}
            if rows[0].is_permanent or prod(sizes.values()) > 1:
                mesh |= sizes if self._is_split(rows) else {option: prod(sizes.values())}
        return mesh

    def place_of(self, rank: int) -> dict[str, int]:
        """Position of a rank along each axis of the plan, keyed by the axis's name, outermost first."""
        return {row.name: rank // self._strides[row.name] % self.sizes[row.name] for row in self.rows}

    def has_line(self, name: str) -> bool:
        """Whether `line` knows a line with this name."""
        return name in self._lines

    @cached_property
    def axes_of_owner(self) -> dict[str, int]:
        """Axes of the ranks that hold the same parameters, whole or in parts (see `per_owner`): the number of ranks
        along each axis, keyed by the axis's `option`, outermost first. An axis of one rank is left out, unless it is
        permanent.
        """
        found = {}
        for option, (first, *others) in self._together.items():
            size = prod(self.sizes[row.name] for row in (first, *others))
            if first.is_permanent or (size > 1 and (first.cuts_parameters or first.splits_tokens)):
                found[option] = size
        return found

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
        named = {**self._together, **{row.name: [row] for row in self.rows}}
        lines = {name: self._line_of(rows.__contains__) for name, rows in named.items()}
        joined = {line.name: line for line in (self.tokens, self.slices, self.owners) if line.size > 1}
        return {**lines, **joined, "ends": self.owners}

    def _line_of(self, has_role: Callable[[AxisRow], bool]) -> Line:
        """Return the line of the axes with this role. If it joins axes whose sizes several fields of `Layout` set, it
        is called `shard` if its ranks store slices of one copy, and `tokens` if they see different tokens. Otherwise,
        the names of the axes are joined.
        """
        mine = [row for row in self.rows if has_role(row)]
        in_use = [row for row in mine if self.sizes[row.name] > 1]
        options = list(dict.fromkeys(row.option for row in in_use or mine[:1]))
        axes = tuple(dict.fromkeys(self._mesh_axis(row) for row in in_use))
        if len(options) == 1:
            name = axes[0] if len(axes) == 1 else options[0]
        elif all(row.splits_tokens for row in in_use):
            name = "shard" if all(self.stores_slices(row) for row in in_use) else "tokens"
        else:
            name = "_".join(options)
        return Line(name, axes, self._steps(in_use or mine[-1:]))

    def _steps(self, rows: Sequence[AxisRow]) -> tuple[tuple[int, int], ...]:
        steps: list[tuple[int, int]] = []
        for row in rows:
            size, stride = self.sizes[row.name], self._strides[row.name]
            if steps and steps[-1][1] == size * stride:
                size *= steps.pop()[0]
            steps.append((size, stride))
        return tuple(steps)

    def _mesh_axis(self, row: AxisRow) -> str:
        """Name of the device mesh's axis that an axis belongs to. If only one of the axes that share a field of
        `Layout` has several ranks, these axes are one axis of the mesh, which has the name of the field.
        """
        return row.name if self._is_split(self._together[row.option]) else row.option

    def _is_split(self, rows: Sequence[AxisRow]) -> bool:
        """Whether axes that share a field of `Layout` are different axes of the device mesh: if all of them have
        several ranks, or if there are several copies of experts while all other parameters are stored in slices.
        """
        sizes = [self.sizes[row.name] for row in rows]
        return min(sizes) > 1 or (self.shards and rows[0].is_folded and len(rows) > 1 and sizes[0] > 1)

    @cached_property
    def _together(self) -> dict[str, list[AxisRow]]:
        """Axes that share a field of `Layout`, keyed by the name of the field, outermost first."""
        return {row.option: [each for each in self.rows if each.option == row.option] for row in self.rows}

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
