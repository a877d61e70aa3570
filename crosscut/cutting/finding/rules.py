"""Plan of a module, made of the groups that can be cut and of the matrices that are left."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from crosscut.cutting.finding.draws import whole_dropouts
from crosscut.cutting.finding.playback import Subject
from crosscut.cutting.finding.reads import Read
from crosscut.cutting.finding.search import Cut, Failed, Search, is_same
from crosscut.cutting.finding.wires import Group, Wires, find_groups, pattern_of, told_name
from crosscut.cutting.looking.matrices import Matrix, may_be_matrix, stand_in
from crosscut.cutting.plan import Plan, Rule, Style, Table

LARGE = 0.01
"""Share of the parameters from which a matrix that stays whole is named."""
_SMALL = 0.001
"""Share of the parameters below which a matrix is not worth a message."""

_T = TypeVar("_T")


@dataclass
class Finding:
    """Rules that have been found so far."""

    subject: Subject
    wires: Wires
    search: Search
    rules: dict[str, Rule] = field(default_factory=dict)
    """Rules by the names of modules."""
    cuts: list[Cut] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons why layers are not the columns of a group."""

    # --- groups -------------------------------------------------------------------------------------------------------

    def find_cuts(self) -> None:
        """Cut each group that can be cut, in the order of the calls. Groups without a linear layer before the rows come
        last, because they would keep these rows from others.
        """
        matrices, groups = self.subject.matrices, find_groups(self.wires, self.search.draws[0])
        for group in sorted(groups, key=lambda each: all(matrices[call.name].is_embedding for call in each.columns)):
            found = self._cut(group)
            if isinstance(found, Failed):
                for call in group.columns:
                    self.failed.setdefault(call.name, found.reason)
                if {call.name for call in group.columns} & {call.name for call in group.rows}:
                    self._cut_apart(group)
            else:
                self.cuts.append(found)

    def _cut_apart(self, group: Group) -> None:
        """Cut the layers of a chain of equal layers one after the other: the first two are a pair, and so on."""
        for part in find_groups(self.wires, self.search.draws[0], of_equal_layers=False):
            if {*part.columns} < {*group.columns} and not isinstance(found := self._cut(part), Failed):
                self.cuts.append(found)

    def _cut(self, group: Group) -> Cut | Failed:
        found = self.search.cut(group, self.cuts)
        if isinstance(found, Failed):
            return found
        names = [*{call.name: None for call in (*group.columns, *group.rows)}]
        if taken := next((name for name in names if name in self.rules), None):
            return Failed(f"`{told_name(taken)}` is cut already")
        if tied := next((name for name in names if self._ties(name)), None):
            return Failed(f"`{told_name(tied)}` has a weight that another layer has, too")
        owners = self._owners(found)
        if isinstance(owners, Failed):
            return owners
        for name in owners:
            reason = "every rank applies it to its own columns"
            self.rules[name] = Rule(style=Style.REPLICATED_WITH_GRAD_ALLREDUCE, reason=reason)
        self._add(found)
        return found

    def _ties(self, name: str) -> list[str]:
        """Return the other matrices that have a matrix's weight."""
        weight = self.subject.matrices[name].weight
        return [other for other, each in self.subject.matrices.items() if each.weight is weight and other != name]

    def _owners(self, cut: Cut) -> list[str] | Failed:
        """Return the modules between the layers of a cut that stay whole, whose gradients are parts of a sum."""
        owners: dict[str, None] = {}
        for name, ends in self.wires.parameters.items():
            module, _, own = name.rpartition(".")
            if not ends.intersection(cut.group.rows):
                continue
            if not ends.issubset(cut.group.rows):
                return Failed(f"`{pattern_of(name)}` is used on whole values, too")
            if Read(module, own) in cut.tables:
                continue
            others = (self.wires.parameters.get(f"{module}.{other}", {None}) for other, _ in self._parameters(module))
            if not all(each.issubset(cut.group.rows) for each in others):
                return Failed(f"`{pattern_of(name)}` is used between the layers, but belongs to a module with others")
            owners[module] = None
        return [*owners]

    def _parameters(self, module: str) -> Iterable[tuple[str, nn.Parameter]]:
        return self.subject.module.get_submodule(module).named_parameters()

    def _add(self, cut: Cut) -> None:
        """Add the rules of a cut."""
        rows = [*{told_name(row.name): None for row in cut.group.rows}]
        columns = [*{told_name(column.name): None for column in cut.group.columns}]
        for name, pieces in cut.pieces.items():
            style = Style.COLWISE if len(pieces.parts) == 1 else Style.PACKED_COLWISE
            if self.subject.matrices[name].is_embedding:
                style = Style.EMBEDDING_COLWISE
            parts = pieces.parts if style is Style.PACKED_COLWISE else ()
            reason = f"each slice of its output reaches only the same slice of the input of {_told(rows)}"
            self.rules[name] = Rule(style=style, parts=parts, units=pieces.units, reason=reason)
        for name, parts in cut.shared.items():
            reason = f"the last {parts[1]} columns of its output go straight to the heads of each rank"
            self.rules[name] = Rule(style=Style.MLA_KV_A_PROJ, parts=parts, reason=reason)
        for row in cut.group.rows:
            self.rules[row.name] = Rule(style=Style.ROWWISE, reason=f"its input comes in slices from {_told(columns)}")

    # --- matrices by themselves ---------------------------------------------------------------------------------------

    def add_single(self) -> None:
        """Cut the matrices that are in no group, and name the large ones that stay whole."""
        shares = self._shares()
        for name, matrix in self.subject.matrices.items():
            if name not in self.rules and shares[matrix.weight] >= _SMALL:
                self.rules[name] = self._single(name, matrix)
        self._add_tied()
        for name in whole_dropouts(self.search.draws[0], self.cuts, self.search.sizes[0]):
            reason = "it gets whole values between layers that are cut, so all ranks draw the same numbers"
            self.rules[name] = Rule(style=Style.REPLICATE, reason=reason)
        whole: dict[str, list[str]] = {}
        covered = {each for name in self.rules for each in self.subject.module.get_submodule(name).parameters()}
        for name, parameter in self.subject.module.named_parameters():
            module, _, own = name.rpartition(".")
            is_large = parameter.dim() > 1 and shares[parameter] >= LARGE
            if is_large and parameter not in covered and not any(Read(module, own) in cut.tables for cut in self.cuts):
                whole.setdefault(module, []).append(self._whole(module, name))
        for module, reasons in whole.items():
            self.rules.setdefault(module, Rule(style=Style.REPLICATE, reason="; ".join(reasons)))

    def _add_tied(self) -> None:
        """Cut the layers that are not called, and have the weight of one that is, like this one."""
        styles = (Style.EMBEDDING_ROWWISE, Style.COLWISE_GATHER_OUTPUT)
        cut = {each.weight: name for name, each in self.subject.matrices.items() if self._style(name) in styles}
        for name, module in self.subject.module.named_modules():
            if name in self.rules or not may_be_matrix(module):
                continue
            if (other := cut.get(module.get_parameter("weight"))) is not None:
                style = styles[0] if isinstance(module, nn.Embedding) else styles[1]
                self.rules[name] = Rule(style=style, reason=f"has the weight of `{other}`, and is not called")

    def _style(self, name: str) -> Style | None:
        return self.rules[name].style if name in self.rules else None

    def _shares(self) -> dict[Tensor, float]:
        """Return the share of the parameters that each parameter has together with those of equal layers."""
        module, sizes = self.subject.module, Counter[str]()
        for name, parameter in module.named_parameters():
            sizes[pattern_of(name)] += parameter.numel()
        return {each: sizes[pattern_of(name)] / sizes.total() for name, each in module.named_parameters()}

    def _single(self, name: str, matrix: Matrix) -> Rule:
        """Return the rule of a matrix that is in no group."""
        size = matrix.num_inputs if matrix.is_embedding else matrix.num_outputs
        names = [f"{each}.weight" for each in (name, *self._ties(name))]
        if direct := next((each for each in names if each in self.wires.parameters), None):
            return Rule(style=Style.REPLICATE, reason=f"`{direct}` is used without a call of its layer")
        if any(-(-size // ranks) * (ranks - 1) >= size for ranks in self.search.sizes):
            return Rule(style=Style.REPLICATE, reason=f"its size {size} is too small for all ranks")
        if self._is_measured(matrix):
            return Rule(style=Style.REPLICATE, reason="other modules read the shape of its weight")
        if matrix.is_embedding:
            return Rule(style=Style.EMBEDDING_ROWWISE, reason="rows can be looked up one rank at a time, and added")
        reason = self.failed.get(name, "its output reaches no layer, or is part of what the module returns")
        return Rule(style=Style.COLWISE_GATHER_OUTPUT, reason=reason)

    def _is_measured(self, matrix: Matrix) -> bool:
        """Whether the module computes something else if a rank holds only some rows of a weight."""
        draw, shape = self.search.draws[0], list(matrix.weight.shape)
        at = 1 - matrix.output_dim if matrix.is_embedding else matrix.output_dim
        for ranks in self.search.sizes:
            part = [-(-size // ranks) if dim == at else size for dim, size in enumerate(shape)]
            with stand_in(matrix.module, torch.zeros(1, 1, dtype=torch.float64).expand(part)), torch.no_grad():
                run = draw.play(lambda call: draw.outputs[call].clone())
            if run.failure is not None or not all(map(is_same, run.results, draw.run.results)):
                return True
        return False

    def _whole(self, module: str, name: str) -> str:
        """Return why a parameter stays whole."""
        held, own = self.subject.module.get_submodule(module), name.rpartition(".")[2]
        if name not in self.wires.parameters:
            return f"`{own}` was not used"
        if own != "weight" or (may_be_matrix(held) and module not in self.subject.not_matrices):
            return f"`{own}` is used directly, and not by a call of its layer"
        return f"{type(held).__name__} is no linear layer, and no embedding that calls `F.embedding`"

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the plan, in which equal layers have one name."""
        module, sizes = self.subject.module, self.search.sizes
        names = [name for name, _ in module.named_modules(remove_duplicate=False)]
        integers: dict[str, dict[str, tuple[int, ...]]] = {}
        for cut in self.cuts:
            for module_name, attribute in cut.integers[sizes[0]]:
                values = tuple(cut.integers[size][Read(module_name, attribute)] for size in sizes)
                integers.setdefault(module_name, {})[attribute] = values
        tables = {
            f"{read.module}.{read.attribute}": Table(dimension=at, reason="one for each head or column")
            for cut in self.cuts
            for read, at in cut.tables.items()
        }
        tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        whole = {name: tuple(values.items()) for name, values in integers.items()}
        return Plan(
            tensor=sizes,
            rules={name: self._with_columns(name, rule) for name, rule in _short(self.rules, names).items()},
            integers={name: dict(values) for name, values in _short(whole, names).items()},
            tables=_short(tables, tensors),
        )

    def _with_columns(self, pattern: str, rule: Rule) -> Rule:
        """Return a rule for rows that names the columns: by a pattern if their numbers are those of the row."""
        if rule.style is not Style.ROWWISE:
            return rule
        rows = [name for name in self.rules if _matches(pattern, name)]
        order = {name: at for at, name in enumerate(self.rules)}
        found: dict[str, list[tuple[str, str]]] = {}
        for row, columns in self.wires.sources.items():
            for column in columns if row.name in rows else ():
                if self.rules[column.name].style is not Style.MLA_KV_A_PROJ:
                    found.setdefault(pattern_of(column.name), []).append((row.name, column.name))
        told: list[str] = []
        for kind in sorted(found, key=lambda kind: order[found[kind][0][1]]):
            if all(_with_numbers_of(row, kind) == column for row, column in found[kind]):
                told.append(kind)
            else:
                told += dict.fromkeys(column for _, column in found[kind])
        return replace(rule, columns=tuple(told))


def _short(values: Mapping[str, _T], names: Sequence[str]) -> dict[str, _T]:
    """Return values by patterns of names instead of names. A pattern covers no name that has another value or none."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(pattern_of(name), []).append(name)
    found: dict[str, _T] = {}
    for kind in dict.fromkeys(pattern_of(name) for name in values):  # in the order of the values
        found |= _fewest(kind, kinds[kind], values)
    return found


def _fewest(pattern: str, names: Sequence[str], values: Mapping[str, _T]) -> dict[str, _T]:
    """Return the values of the names that a pattern covers, by as few patterns as possible."""
    first = values.get(names[0])
    if first is not None and all(values.get(name) == first for name in names):
        return {pattern: first}
    best: dict[str, _T] | None = None
    pieces = pattern.split(".")
    for at, piece in enumerate(pieces):
        if piece != "*" or not any(name in values for name in names):
            continue
        divided: dict[str, list[str]] = {}
        for name in names:
            divided.setdefault(".".join([*pieces[:at], name.split(".")[at], *pieces[at + 1 :]]), []).append(name)
        found = {key: value for some, own in divided.items() for key, value in _fewest(some, own, values).items()}
        best = found if best is None or len(found) < len(best) else best
    return best or {}


def _matches(pattern: str, name: str) -> bool:
    own, other = pattern.split("."), name.split(".")
    return len(own) == len(other) and all(
        one == two or (one == "*" and two.isdigit()) for one, two in zip(own, other, strict=True)
    )


def _with_numbers_of(row: str, pattern: str) -> str:
    """Pattern in which the first stars are the numbers of a row's name."""
    for number in (part for part in row.split(".") if part.isdigit()):
        pattern = pattern.replace("*", number, 1)
    return pattern


def _told(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(names) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
