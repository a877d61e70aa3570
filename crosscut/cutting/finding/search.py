"""Search for what must be divided so that a rank's part of some layers computes its part of the next ones' inputs.

No ranks are needed: the module runs once for each rank, with the rank's columns in place of the whole outputs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import combinations, product

import torch
from torch import Tensor

from crosscut.cutting.finding.candidates import Candidates
from crosscut.cutting.finding.pieces import Pieces, divisions
from crosscut.cutting.finding.playback import Call, Draw, Run
from crosscut.cutting.finding.reads import Read, changed
from crosscut.cutting.finding.wires import Group, Wires, columns_to, pattern_of, told_name, without_inner

_EXACT = 1e-9
_MOST = 3
"""Largest number of integers and tables that are changed together."""
_MOST_TABLES = 2


@dataclass(frozen=True)
class Cut:
    """Cut of a group of layers that was found to be right on all ranks."""

    group: Group
    pieces: dict[str, Pieces]
    """Divisions of the columns by names of modules."""
    integers: dict[int, dict[Read, int]]
    """Values of attributes for each number of ranks."""
    tables: dict[Read, int]
    """Parameters and buffers by head, and the dimension along which they are divided."""
    shared: dict[str, tuple[int, int]]
    """Layers of the group that stay whole, and the sizes of their outputs' two parts."""


@dataclass
class Failed:
    """Group that cannot be cut."""

    reason: str
    progress: tuple[int, int] = (0, 0)
    """Progress of a run that ended in an error: number of calls, and number of the line. Zeros without an error."""


@dataclass
class Search:
    """Search in one module, with several draws."""

    draws: Sequence[Draw]
    sizes: tuple[int, ...]
    """Numbers of ranks."""
    wires: Wires
    _failed: Failed = field(default_factory=lambda: Failed(""))
    _wrong: set[tuple[object, ...]] = field(default_factory=set)
    """Changes that were tried and are wrong."""

    def cut(self, group: Group, others: Sequence[Cut]) -> Cut | Failed:
        """Return how a group can be cut, beside others, at all numbers of ranks. The first of equal layers is searched.
        The others are checked, and searched only if they turn out not to be equal.
        """
        if group.reaches_result:
            return Failed("its output is part of what the module returns")
        group = without_inner(group, self.wires)
        if isinstance(shared := self._shared(group), Failed):
            return shared
        first = tuple({pattern_of(row.name): row for row in reversed(group.rows)}.values())
        for rows in (first, group.rows) if len(first) < len(group.rows) else (first,):
            found = self._cut(group, rows, shared)
            if isinstance(found, Cut) and (failed := self._goes_with([*others, found])) is not None:
                found = failed
            if isinstance(found, Cut):
                break
        return found

    def _shared(self, group: Group) -> dict[str, tuple[int, int]] | Failed:
        """Return the two parts of the layers that stay whole."""
        draw, found = self.draws[0], dict[str, tuple[int, int]]()
        for call in group.shared:
            straight = columns_to(draw, call, group.rows)
            inner = columns_to(draw, call, {*draw.run.inputs} - {*group.rows})
            width = draw.outputs[call].shape[-1]
            if not inner or not straight or [*inner, *straight] != list(range(width)):
                return _mixed(group)
            found[call.name] = (len(inner), len(straight))
        return found

    def _cut(self, group: Group, rows: tuple[Call, ...], shared: dict[str, tuple[int, int]]) -> Cut | Failed:
        found = self._pieces(group, rows)
        if isinstance(found, Failed):
            return found
        candidates = Candidates.between(self.draws[0], group, rows)
        integers, tables = candidates.integers(self.sizes), candidates.tables(self.wires, self.sizes)
        self._failed, self._wrong = Failed(""), set()
        for number in range(_MOST + 1):
            for num_tables in range(min(number, _MOST_TABLES) + 1):
                for some in combinations(tables, num_tables):
                    chosen = {read: at for equal, at in some for read in equal}
                    trial = Cut(replace(group, rows=rows), found, {}, chosen, shared)
                    if (values := self._values(trial, integers, number - num_tables)) is not None:
                        return replace(trial, group=group, integers=values)
        return self._failed

    def _values(
        self, trial: Cut, integers: Mapping[Read, Mapping[Read, int]], most: int
    ) -> dict[int, dict[Read, int]] | None:
        """Return the integers for each number of ranks, of which at most `most` are changed. Every integer that is
        changed for one number has a value for all.
        """
        values: dict[int, dict[Read, int]] = {}
        for size in self.sizes:
            if (value := self._integers(trial, size, integers, values, most)) is None:
                return None
            values[size] = value
        every = {read: value for held in integers.values() for read, value in held.items()}
        used = {read: every[read] for each in values.values() for read in each}
        return {size: used | value for size, value in values.items()}

    # --- columns ------------------------------------------------------------------------------------------------------

    def _pieces(self, group: Group, rows: tuple[Call, ...]) -> dict[str, Pieces] | Failed:
        """Find how the columns of each layer are divided so that a rank's columns reach only the rank's rows."""
        if not group.columns or not rows:
            return _mixed(group)
        found: dict[str, Pieces] = {}
        kinds: dict[str, list[Call]] = {}
        for call in group.columns:
            kinds.setdefault(pattern_of(call.name), []).append(call)
        for calls in kinds.values():
            widths = {call: self._rows_of(group, call) for call in calls}
            choices = [list(self._divisions(call, widths[call])) for call in calls]
            for choice in zip(*choices, strict=False):
                taken = dict(zip(calls, choice, strict=True))
                if all(self._keep_apart(rows, taken, size) for size in self.sizes):
                    found |= {call.name: pieces for call, pieces in taken.items()}
                    break
            else:
                return _mixed(group)
        if not any(pieces.is_cut(size) for pieces in found.values() for size in self.sizes):
            return _mixed(group)
        return found

    def _rows_of(self, group: Group, column: Call) -> int:
        """Return the number of rows of the layer to which a layer leads."""
        matrices = self.draws[0].subject.matrices
        return max(matrices[row.name].num_inputs for row in group.rows if column in self.wires.sources[row])

    def _divisions(self, call: Call, num_inputs: int) -> Iterator[Pieces]:
        num_outputs = self.draws[0].subject.matrices[call.name].num_outputs
        for pieces in divisions(num_outputs, num_inputs, max(self.sizes)):
            if all(pieces.fits(size) for size in self.sizes):
                yield pieces

    def _keep_apart(self, rows: tuple[Call, ...], taken: Mapping[Call, Pieces], size: int) -> bool:
        """Whether a change of a rank's columns changes only the rows of the ranks that hold them."""
        reached = [row for row in rows if not self.wires.sources[row].isdisjoint(taken)]
        for rank in range(size) if reached else ():
            held = next(iter(taken.values())).holders(rank, size)
            if len(held) == size:
                continue
            soon = self._moved(taken, rank, size, reached[:1])  # most wrong divisions are seen at the first layer
            if not soon <= {*held} or not self._moved(taken, rank, size, rows) <= {*held}:
                return False
        return True

    def _moved(self, taken: Mapping[Call, Pieces], rank: int, size: int, rows: Sequence[Call]) -> set[int]:
        """Return the ranks whose rows change if a rank's columns change."""
        draw, generator = self.draws[0], torch.Generator().manual_seed(rank)

        def bumped(call: Call) -> Tensor:
            output = draw.outputs[call].clone()
            if call in taken:
                at = taken[call].columns(rank, size)
                output[..., at] += torch.randn(*output.shape[:-1], len(at), dtype=output.dtype, generator=generator)
            return output

        with torch.no_grad():
            run = draw.play(bumped, stop={*rows})
        moved: set[int] = set()
        for row in rows:
            whole, now = draw.run.inputs[row], run.inputs.get(row)
            if now is None or now.shape != whole.shape or whole.shape[-1] % size:
                return {*range(size)}
            changed_columns = ((now - whole).abs() > _EXACT).flatten(0, -2).any(0)
            moved |= {*changed_columns.view(size, -1).any(1).nonzero().flatten().tolist()}
        return moved

    # --- integers -----------------------------------------------------------------------------------------------------

    def _integers(
        self,
        trial: Cut,
        size: int,
        kinds: Mapping[Read, Mapping[Read, int]],
        known: Mapping[int, Mapping[Read, int]],
        most: int,
    ) -> dict[Read, int] | None:
        """Return the smallest set of integers that must be changed, and their values."""
        before = {read for values in known.values() for read in values}
        order = sorted(kinds, key=lambda kind: kind not in before)
        for number in range(min(most, len(order)) + 1):
            for chosen in combinations(order, number):
                for divisors in product(*(_divisors(kinds[kind].values(), size) for kind in chosen)):
                    values = {
                        read: value // divisor
                        for kind, divisor in zip(chosen, divisors, strict=True)
                        for read, value in kinds[kind].items()
                    }
                    if self._is_right(trial, size, values):
                        return values
        return None

    def _is_right(self, trial: Cut, size: int, values: Mapping[Read, int]) -> bool:
        """Whether every rank computes its part of the rows' inputs."""
        key = (size, *trial.tables.items(), *values.items())
        if key in self._wrong:
            return False
        for draw in self.draws:
            for rank in reversed(range(size)):  # the last rank is right by accident most rarely
                run = play_rank(draw, [trial], rank, size, values, to_end=False)
                if (failed := _first_difference(draw, run, {*trial.group.rows}, rank, size)) is not None:
                    # With the integers that are needed, the module comes further, and the rest is the reason.
                    if not self._failed.reason or (0, 0) < self._failed.progress < failed.progress:
                        self._failed = failed
                    self._wrong.add(key)
                    return False
        return True

    def _goes_with(self, cuts: Sequence[Cut]) -> Failed | None:
        """Return why several cuts of one module cannot be made together. None if the whole module stays right."""
        for size in self.sizes:
            values: dict[Read, int] = {}
            for cut in cuts:
                if any(values.get(read, value) != value for read, value in cut.integers[size].items()):
                    return Failed("another layer needs another value of the same integer")
                values |= cut.integers[size]
            for rank in range(size):
                run = play_rank(self.draws[0], cuts, rank, size, values, to_end=True)
                rows = {row for cut in cuts for row in cut.group.rows}
                if (failed := _first_difference(self.draws[0], run, rows, rank, size)) is not None:
                    return failed
                if not all(map(is_same, run.results, self.draws[0].run.results)):
                    return Failed("what the module returns differs if only a slice of the columns is there")
        return None


def play_rank(
    draw: Draw, cuts: Sequence[Cut], rank: int, size: int, values: Mapping[Read, int], *, to_end: bool
) -> Run:
    """Run the module as a rank would, up to the last row of the cuts or to the end."""
    module = draw.subject.module
    pieces = {call: cut.pieces[call.name] for cut in cuts for call in cut.group.columns}

    def reply(call: Call) -> Tensor:
        output = draw.outputs[call]
        return output[..., pieces[call].columns(rank, size)] if call in pieces else output.clone()

    tensors: dict[Read, Tensor] = {}
    for cut in cuts:
        for read, dimension in cut.tables.items():
            table = getattr(module.get_submodule(read.module), read.attribute)
            value = draw.values.get(table, table).detach()
            tensors[read] = value.chunk(size, dimension)[rank]
    with changed(module, values, tensors), torch.no_grad():
        return draw.play(reply, stop={*cuts[0].group.rows} if not to_end else None)


def _first_difference(draw: Draw, run: Run, rows: AbstractSet[Call], rank: int, size: int) -> Failed | None:
    """Return why the inputs of layers are not the rank's parts of the whole inputs, or the whole ones."""
    if run.failure is not None:
        told = (
            f"{run.failure.module} fails on a slice at {run.failure.place}: {run.failure.text}. If the line has a size "
            "of the uncut module, write -1, or make the size an attribute of the module"
        )
        return Failed(told, (len(run.calls), run.failure.line[1]))
    for call, whole in draw.run.inputs.items():
        expected = whole.chunk(size, -1)[rank] if call in rows else whole
        if (call in run.inputs or call in rows) and not is_same(run.inputs.get(call), expected):
            return Failed(f"the input of `{told_name(call.name)}` differs if only a slice of the columns is there")
    return None


def is_same(mine: Tensor | None, expected: Tensor) -> bool:
    """Whether values are the same, up to rounding."""
    return (
        mine is not None
        and mine.shape == expected.shape
        and torch.allclose(mine, expected, rtol=_EXACT, atol=_EXACT, equal_nan=True)
    )


def _divisors(values: Collection[int], size: int) -> list[int]:
    """Numbers by which integers can be divided, the number of ranks first."""
    return [each for each in range(size, 1, -1) if size % each == 0 and all(value % each == 0 for value in values)]


def _mixed(group: Group) -> Failed:
    rows = [*{told_name(row.name): None for row in group.rows}]
    return Failed(f"a slice of its output reaches all of the input of {_listed(rows)}")


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(names) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
