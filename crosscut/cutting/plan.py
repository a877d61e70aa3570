"""A plan of how a plain module is cut: data that a person can read, edit and keep beside the module."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

from crosscut.config import ConfigError, LayoutError
from crosscut.config.checks import shown


class Style(StrEnum):
    """Ways to cut a module, under the names of transformers' `tp_plan`. `OURS` are the exceptions."""

    COLWISE = "colwise"
    """Linear layer cut by columns. Every rank gets the whole input and returns its part of the output."""

    PACKED_COLWISE = "packed_colwise"
    """Several matrices side by side in one linear layer, each cut by columns."""

    COLWISE_GATHER_OUTPUT = "colwise_gather_output"
    """Linear layer cut by columns, whose output is gathered."""

    ROWWISE = "rowwise"
    """Linear layer cut by rows. Every rank gets its part of the input, and the outputs are summed."""

    ROWWISE_SPLIT_INPUT = "rowwise_split_input"
    """Linear layer cut by rows, of whose whole input every rank takes its part."""

    EMBEDDING_ROWWISE = "embedding_rowwise"
    """Embedding of which every rank holds some of the rows (the vocabulary). The outputs are summed."""

    EMBEDDING_COLWISE = "embedding_colwise"
    """Embedding of which every rank holds some of the columns, such as a bias for each head. Ours: nothing is
    gathered.
    """

    REPLICATE = "replicate"
    """Module that every rank holds whole, and computes on whole values. Between layers cut by columns and rows, where
    ranks draw different random numbers, its dropout draws the same numbers on all ranks.
    """

    REPLICATED_WITH_GRAD_ALLREDUCE = "replicated_with_grad_allreduce"
    """Module that every rank holds whole, and applies to its own heads or columns. Gradients are summed."""

    MLA_KV_A_PROJ = "mla_kv_a_proj"
    """Linear layer that every rank holds whole, of whose output the last part (`parts`) goes straight to the rank's own
    heads (latent attention). The gradient of that part is summed.
    """

    SPATIAL = "spatial"
    """Layer over images of which every rank has a part. Ours."""

    SPATIAL_SPLIT_INPUT = "spatial_split_input"
    """Module at which whole images enter: every rank takes its part of the input. Ours."""

    SPATIAL_GATHER_OUTPUT = "spatial_gather_output"
    """Module after which images are whole again: the parts of the output are gathered. Ours."""


IMAGES = (Style.SPATIAL, Style.SPATIAL_SPLIT_INPUT, Style.SPATIAL_GATHER_OUTPUT)
"""Styles of modules over images that the context ranks share."""

OURS = (Style.EMBEDDING_COLWISE, *IMAGES)
"""Styles that mean something else in transformers, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Cut of the modules with one name pattern."""

    style: Style
    reason: str = ""
    """Words for a reader: why this cut is possible, or why the module stays whole."""

    parts: tuple[int, ...] = ()
    """Output sizes of the parts of a packed layer, in their order."""

    units: int = 0
    """Number of equal pieces of which a rank may hold one or several, such as heads. With more ranks than pieces,
    neighbours hold the same piece. 0: any column may be separated from the next. Of a packed layer, the number of
    pieces of the smallest part; the pieces of all parts have the same width.
    """

    columns: tuple[str, ...] = ()
    """Names of the layers cut by columns that lead to this layer, which is cut by rows."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Parameter or buffer that goes by head or column, and belongs to no linear layer or embedding."""

    dimension: int
    """Dimension along which ranks divide it."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Cut of a whole module. Names are those of `named_modules`, in which `*` stands for one number."""

    tensor: tuple[int, ...] = (1,)
    """Numbers of tensor ranks for which the plan is meant."""

    rules: Mapping[str, Rule]
    """Rules by the names of modules."""

    grid: tuple[int, ...] = ()
    """Numbers of context ranks along each direction of the images that they share; empty if the plan cuts no images."""

    integers: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Attributes of modules that say how many heads or columns a rank has: by the names of modules and of attributes,
    their values for each number of ranks in `tensor`. `config.num_heads` is an attribute of an object that the module
    holds.
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    """Parameters and buffers that go by head, by their names."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is impossible, whatever the module is."""
        sizes = self.tensor
        if not sizes or any(type(size) is not int or size < 1 for size in sizes) or len({*sizes}) < len(sizes):
            raise ConfigError(
                f"`tensor` must be the different numbers of ranks of a plan, each at least 1, but is {shown(sizes)}. "
                "Write for example [2, 4]."
            )
        _require_grid(self)
        for name, rule in self.rules.items():
            _require_possible(f"rules.{name}", rule)
        for name, attributes in self.integers.items():
            for attribute, values in attributes.items():
                _require_counts(f"integers.{name}.{attribute}", values, sizes)

    def require_context(self, num_ranks: int) -> None:
        """Raise `LayoutError` if the plan is not meant for this number of context ranks."""
        if prod(self.grid) != num_ranks and num_ranks > 1:
            told = (
                f"{prod(self.grid)}, the ranks of the plan's `grid`" if self.grid else "1, since the plan has no `grid`"
            )
            raise LayoutError(f"`layout.context` must be {told}, but is {num_ranks}. Change the layout or the plan.")

    def values(self, num_ranks: int) -> dict[str, dict[str, int]]:
        """Return the attributes of modules for a number of ranks, by the names of modules and of attributes. Raises
        `LayoutError` if the plan is not meant for this number.
        """
        if num_ranks == 1:
            return {}
        if num_ranks not in self.tensor:
            raise LayoutError(
                f"The number of tensor ranks must be one of the plan's (`tensor` = {list(self.tensor)}), but is "
                f"{num_ranks}. Change the layout, or make a plan for {num_ranks} ranks."
            )
        at = self.tensor.index(num_ranks)
        return {name: {key: each[at] for key, each in values.items()} for name, values in self.integers.items()}


_OF_PARTS = (Style.PACKED_COLWISE, Style.MLA_KV_A_PROJ)
"""Styles of layers whose output has several parts."""
_OF_COLUMNS = (Style.ROWWISE,)
"""Styles of layers to which layers cut by columns lead."""


def _require_possible(name: str, rule: Rule) -> None:
    """Raise `ConfigError` if a rule has a value that its style does not use, or an impossible value."""
    if rule.units < 0:
        raise ConfigError(f"`{name}.units` must be at least 0, but is {rule.units}. 0 means any number of pieces.")
    if rule.parts and min(rule.parts) < 1:
        raise ConfigError(f"`{name}.parts` must be sizes of at least 1, but is {shown(rule.parts)}. Correct the sizes.")
    for key, styles in (("parts", _OF_PARTS), ("columns", _OF_COLUMNS)):
        if getattr(rule, key) and rule.style not in styles:
            told = " or ".join(f"`{style}`" for style in styles)
            raise ConfigError(
                f"`{name}.{key}` must be given only with the style {told}, but the style is `{rule.style}`. Remove "
                f"`{key}`, or change the style."
            )
    if rule.style in _OF_PARTS and not rule.parts:
        raise ConfigError(
            f"`{name}.parts` must be the sizes of the layer's parts with the style `{rule.style}`, but is missing. Add "
            "for example parts = [64, 64]."
        )


def _require_grid(plan: Plan) -> None:
    """Raise `ConfigError` if the grid of a plan does not suit its rules."""
    sizes, entries = plan.grid, [name for name, rule in plan.rules.items() if rule.style in IMAGES]
    if entries and not sizes:
        raise ConfigError(
            f"`grid` must be the numbers of ranks along the directions of images, because `{entries[0]}` cuts images, "
            "but is missing. Add for example grid = [2, 2]."
        )
    if not sizes:
        return
    if len(sizes) > 3 or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(
            f"`grid` must be one to three numbers of ranks, each at least 1, but is {shown(sizes)}. Write one number "
            "for each direction, as in [2, 2] for height and width."
        )
    if not any(plan.rules[name].style is Style.SPATIAL_SPLIT_INPUT for name in entries):
        raise ConfigError(
            "`grid` must come with a rule of the style `spatial_split_input`, at which images enter, but there is "
            "none. Give this style to the first layer."
        )
    if plan.tensor != (1,):
        raise ConfigError(
            f"`tensor` must be [1] in a plan with a `grid`, but is {shown(plan.tensor)}. Remove `tensor`: context "
            "ranks share the images, and each holds all weights."
        )


def _require_counts(name: str, values: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    if len(values) != len(sizes):
        raise ConfigError(
            f"`{name}` must have a value for each of the {len(sizes)} numbers of ranks in `tensor`, but has "
            f"{len(values)}: {shown(values)}. Write the value of each rank at {', '.join(map(str, sizes))} ranks."
        )


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
"""Part of a name that is a number."""


def expand(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that a pattern means, in their order. `*` stands for one number. Raises `ConfigError` if there are none."""
    form = re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))
    found = [name for name in names if form.fullmatch(name)]
    if not found:
        raise ConfigError(f"`{pattern}` in a plan must name a module, but matches none. Correct or remove the line.")
    return found


def numbers_in(name: str) -> list[str]:
    """Numbers in a name for which a pattern has `*`, in their order."""
    return _NUMBER.findall(name)


def with_numbers(pattern: str, numbers: Iterable[str]) -> str:
    """Pattern in which the first stars are replaced by numbers, as many as there are."""
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


def patterns(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by their patterns: numbers become `*`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_NUMBER.sub("*", name), []).append(name)
    return found
