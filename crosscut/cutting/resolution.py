"""Plan applied to one module at one number of ranks: which layer is cut how, and which part of every parameter a rank
holds. All mistakes of a plan are found here, before a module changes.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from torch import Tensor, nn

from crosscut.config import ConfigError, LayoutError
from crosscut.cutting.images.rules import kind_of, require_listable, require_listed
from crosscut.cutting.looking.attributes import can_be_set, value_of
from crosscut.cutting.looking.matrices import is_plain, is_transposed
from crosscut.cutting.plan import IMAGES, Plan, Rule, Style, expand, numbers_in, with_numbers
from crosscut.cutting.shares import SUMMED, WHOLE, Share, Span, even_spans, uneven_spans

_T = TypeVar("_T")

Shares = Mapping[str, Share]
"""Shares of a layer's own parameters, by their names in the layer. Parameters that are not named are held whole."""


@dataclass(frozen=True)
class Layer:
    """Layer that a rule names."""

    name: str
    module: nn.Module
    rule: Rule
    regions: frozenset[str] = frozenset()
    """Names of the layers cut by rows to which this layer leads; of a layer cut by rows, its own name."""


@dataclass(frozen=True)
class Resolved:
    """Plan applied to one module at one number of ranks."""

    num_ranks: int
    layers: Mapping[str, Layer]
    """Layers that rules name, by their names."""
    shares: Mapping[str, Share]
    """Shares of all parameters and of the cut buffers, by their names. A tied parameter has several names."""
    integers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """New values of modules' attributes, by the names of modules and of attributes."""
    kept: frozenset[str] = frozenset()
    """Names under which modules keep parameters that the rules of other modules cut."""


def resolve(module: nn.Module, plan: Plan, num_ranks: int) -> Resolved:
    """Apply a plan to a module at a number of ranks. Changes nothing.

    Raises `ConfigError` if a rule does not fit its module or matches none, and `LayoutError` if the plan is not meant
    for this number of ranks or the ranks cannot divide a size.
    """
    values = plan.values(num_ranks)
    names = _first_names(module)
    rules = _rules(plan, names)
    leads = _regions(rules, names)
    _require_images(module, rules, plan)
    layers = {
        name: Layer(name, module.get_submodule(name), rule, frozenset(leads.get(name, ())))
        for name, rule in rules.items()
    }
    shares: dict[str, Share] = {}
    for layer in layers.values():
        for key, share in _shares_of(layer, num_ranks).items():
            shares[f"{layer.name}.{key}".removeprefix(".")] = share
    shares |= _of_tables(module, plan, num_ranks, shares)
    shares, kept = _with_ties(module, shares)
    return Resolved(num_ranks, layers, shares, _integers(module, values, names), kept)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each module, by all of its names."""
    first = {id(each): name for name, each in module.named_modules()}
    return {name: first[id(each)] for name, each in module.named_modules(remove_duplicate=False)}


def _patterns_of(patterns: Iterable[str], names: Mapping[str, _T], what: str) -> dict[_T, str]:
    """Return the pattern that matches each thing. `names` maps all names of things to one for each. Raises
    `ConfigError` if a pattern matches nothing, or two match one thing.
    """
    found: dict[_T, str] = {}
    for pattern in patterns:
        for name in expand(pattern, names):
            if (other := found.setdefault(names[name], pattern)) != pattern:
                raise ConfigError(
                    f"`{name}` must have one {what} in a plan, but matches `{other}` and `{pattern}`. Remove one."
                )
    return found


def _rules(plan: Plan, names: Mapping[str, str]) -> dict[str, Rule]:
    """Return the rules of modules by their first names."""
    return {name: plan.rules[pattern] for name, pattern in _patterns_of(plan.rules, names, "rule").items()}


def _regions(rules: Mapping[str, Rule], names: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the regions of the layers that are cut by columns and by rows: names of layers cut by rows, by names."""
    found: dict[str, set[str]] = {}
    for row, rule in rules.items():
        for pattern in rule.columns:
            for column in (names[name] for name in expand(with_numbers(pattern, numbers_in(row)), names)):
                if column not in rules:
                    raise ConfigError(
                        f"`columns` of `{row}` must name layers that have a rule, but `{column}` has none. Add a rule, "
                        "or remove the name."
                    )
                found.setdefault(column, set()).add(row)
                found.setdefault(row, set()).add(row)
    return found


def _require_images(module: nn.Module, rules: Mapping[str, Rule], plan: Plan) -> None:
    """Raise `ConfigError` if the rules for images do not fit the module."""
    for name, rule in rules.items():
        if rule.style in IMAGES:
            require_listable(name, module.get_submodule(name), rule, len(plan.grid))
    require_listed(module, rules)


def _shares_of(layer: Layer, num_ranks: int) -> Shares:
    """Return the shares of a layer. Raises `ConfigError` if the layer does not compute with its own parameters as its
    style does.
    """
    shares = _SHARES[layer.rule.style](layer, num_ranks)
    for key in ("weight", "bias"):
        if key in shares and layer.module._parameters.get(key) is None:
            raise ConfigError(
                f"`{layer.name}` must have a parameter `{key}` to be cut, but computes it from others, for example by "
                "`weight_norm`. Remove the rule."
            )
    if layer.rule.style not in _OF_OWN_FORWARD and not computes_as_its_base(layer.module):
        raise ConfigError(
            f"`{layer.name}` must compute what its base class computes to be cut, but {type(layer.module).__name__} "
            "computes something else. Remove the rule, or call `super().forward`."
        )
    return shares


_OF_OWN_FORWARD = (Style.REPLICATE, Style.REPLICATED_WITH_GRAD_ALLREDUCE, Style.EMBEDDING_COLWISE, *IMAGES)
"""Styles whose layers keep the `forward` of their class."""


def calls_super(kind: type[nn.Module]) -> bool:
    """Whether the `forward` of a class calls that of its base class in its own code."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "super" in code.co_names


def computes_as_its_base(module: nn.Module) -> bool:
    """Whether a linear layer or an embedding computes what its base class computes, up to code around a call of
    `super().forward`.
    """
    base = next((each for each in (nn.Linear, nn.Embedding) if isinstance(module, each)), None)
    if (base is not None and type(module).forward is base.forward) or calls_super(type(module)):
        return True
    return is_plain(module, output_dim=1 if is_transposed(module) or base is nn.Embedding else 0)


def _columns(layer: Layer, num_ranks: int) -> Shares:
    size = _linear_sizes(layer)[1]
    parts = layer.rule.parts or (size,)
    if sum(parts) != size:
        raise ConfigError(
            f"`parts` of `{layer.name}` must add up to {size}, the layer's output size, but add up to {sum(parts)}. "
            "Correct the plan."
        )
    return _of_columns(layer, even_spans(layer.name, parts, layer.rule.units, num_ranks))


def _gathered_columns(layer: Layer, num_ranks: int) -> Shares:
    return _of_columns(layer, uneven_spans(layer.name, _linear_sizes(layer)[1], num_ranks))


def _of_columns(layer: Layer, spans: Sequence[Sequence[Span]]) -> Shares:
    return {
        "weight": Share.cut(1 if is_transposed(layer.module) else 0, spans),
        **({"bias": Share.cut(0, spans)} if layer.module._parameters.get("bias") is not None else {}),
    }


def _rows(layer: Layer, num_ranks: int) -> Shares:
    spans = even_spans(layer.name, [_linear_sizes(layer)[0]], layer.rule.units, num_ranks)
    share = Share.cut(0 if is_transposed(layer.module) else 1, spans)
    if share.is_whole:
        raise LayoutError(
            f"The number of tensor ranks must divide {layer.rule.units}, the `units` of `{layer.name}`, because ranks "
            f"cannot share the rows of a layer, but is {num_ranks}. Change the layout, or remove the rule."
        )
    return {"weight": share}


def _embedding_rows(layer: Layer, num_ranks: int) -> Shares:
    table = _embedding(layer)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(table, option):
            raise ConfigError(
                f"`{layer.name}` must be an embedding without `{option}` to be cut by rows, but has it. Remove the "
                "option, or the rule."
            )
    return {"weight": Share.cut(0, uneven_spans(layer.name, table.num_embeddings, num_ranks))}


def _embedding_columns(layer: Layer, num_ranks: int) -> Shares:
    parts = [_embedding(layer).embedding_dim]
    return {"weight": Share.cut(1, even_spans(layer.name, parts, layer.rule.units, num_ranks))}


def _whole(_layer: Layer, _num_ranks: int) -> Shares:
    return {}


def _summed(layer: Layer, _num_ranks: int) -> Shares:
    return {name: SUMMED for name, _ in layer.module.named_parameters()}


def _over_images(layer: Layer, _num_ranks: int) -> Shares:
    """Shares of a layer whose context ranks use all weights on their own positions."""
    return {} if kind_of(layer.module) is None else {key: SUMMED for key, _ in layer.module.named_parameters()}


def _last_part(layer: Layer, _num_ranks: int) -> Shares:
    size, parts = _linear_sizes(layer)[1], layer.rule.parts
    if sum(parts) != size:
        raise ConfigError(
            f"`parts` of `{layer.name}` must add up to {size}, the layer's output size, but add up to {sum(parts)}. "
            "Correct the plan."
        )
    return {}


_SHARES: dict[Style, Callable[[Layer, int], Shares]] = {
    Style.COLWISE: _columns,
    Style.PACKED_COLWISE: _columns,
    Style.COLWISE_GATHER_OUTPUT: _gathered_columns,
    Style.ROWWISE: _rows,
    Style.ROWWISE_SPLIT_INPUT: _rows,
    Style.EMBEDDING_ROWWISE: _embedding_rows,
    Style.EMBEDDING_COLWISE: _embedding_columns,
    Style.REPLICATE: _whole,
    Style.REPLICATED_WITH_GRAD_ALLREDUCE: _summed,
    Style.MLA_KV_A_PROJ: _last_part,
    **dict.fromkeys(IMAGES, _over_images),
}
"""Function of each style that returns the shares of a layer's parameters."""


def _linear_sizes(layer: Layer) -> tuple[int, int]:
    """Return the sizes of a linear layer's input and output. Raises `ConfigError` for another kind of module."""
    if is_transposed(layer.module):
        rows, columns = layer.module._parameters["weight"].shape  # type: ignore[union-attr]
        return rows, columns
    if not isinstance(layer.module, nn.Linear):
        raise _another_kind(layer, "a linear layer (`nn.Linear`, or `Conv1D` of transformers)")
    return layer.module.in_features, layer.module.out_features


def _embedding(layer: Layer) -> nn.Embedding:
    if not isinstance(layer.module, nn.Embedding):
        raise _another_kind(layer, "an `nn.Embedding`")
    return layer.module


def _another_kind(layer: Layer, must_be: str) -> ConfigError:
    return ConfigError(
        f"`{layer.name}` must be {must_be} for the style `{layer.rule.style}`, but is a "
        f"{type(layer.module).__name__}. Remove the rule, or change its style."
    )


def _of_tables(module: nn.Module, plan: Plan, num_ranks: int, taken: Shares) -> Shares:
    """Return the shares of the parameters and buffers that the plan cuts by themselves."""
    tensors = _tensors(module)
    found: dict[str, Share] = {}
    for name, pattern in _patterns_of(plan.tables, {name: name for name in tensors}, "table").items():
        table, shape = plan.tables[pattern], tensors[name].shape
        if name in taken:
            raise ConfigError(f"`{name}` must be cut once, but has a rule and is a table. Remove one of the two.")
        if not -len(shape) <= table.dimension < len(shape):
            raise ConfigError(
                f"`tables.{pattern}.dimension` must be a dimension of `{name}`, whose shape is {tuple(shape)}, but "
                f"is {table.dimension}. Correct the plan."
            )
        dim = table.dimension % len(shape)
        found[name] = Share.cut(dim, even_spans(name, [shape[dim]], 0, num_ranks))
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by their names."""
    pairs: Iterator[tuple[str, Tensor]] = chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    return dict(pairs)


def _with_ties(module: nn.Module, shares: Shares) -> tuple[dict[str, Share], frozenset[str]]:
    """Return the shares of all parameters and of the cut buffers, and the names of parameters that modules only keep.

    A tensor that the plan cuts may have other names: that of the same module under another name, or that of a module
    which only keeps a parameter, such as a head's bias. Other layers need rules, and other buffers lines of their own.
    """
    named = [(name, module.get_submodule(name.rpartition(".")[0]), each) for name, each in _tensors(module).items()]
    of_modules = {(owner, name.rpartition(".")[2]): shares[name] for name, owner, _ in named if name in shares}
    of_parameters = {id(each): shares[name] for name, _, each in named if name in shares and _is_parameter(each)}
    found, kept = dict(shares), list[str]()
    for name, owner, each in named:
        share = of_modules.get((owner, name.rpartition(".")[2]))
        if share is None and id(each) in of_parameters and not _is_layer(owner):
            share = of_parameters[id(each)]
            kept.append(name)
        found[name] = share or WHOLE
    _require_same_of_ties(named, found)
    cut = {name: found[name] for name, _, each in named if _is_parameter(each) or not found[name].is_whole}
    return cut, frozenset(kept)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) or is_transposed(module)


def _require_same_of_ties(named: Iterable[tuple[str, nn.Module, Tensor]], shares: Shares) -> None:
    """Raise `ConfigError` if a tensor that has several names is cut in several ways."""
    first: dict[int, str] = {}
    for name, _, tensor in named:
        other = first.setdefault(id(tensor), name)
        if shares[other] != shares[name]:
            kind = "parameter" if _is_parameter(tensor) else "buffer"
            raise ConfigError(
                f"`{name}` must be cut like `{other}`, because both are the same {kind}, but is cut in another way. "
                f"Give both modules rules or tables that cut the {kind} alike, or none."
            )


def _integers(
    module: nn.Module, values: Mapping[str, Mapping[str, int]], names: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """Return the new values of attributes by the first names of modules."""
    keys = {key for attributes in values.values() for key in attributes}
    found: dict[str, dict[str, int]] = {}
    for key in sorted(keys):
        patterns = [pattern for pattern, attributes in values.items() if key in attributes]
        for name, pattern in _patterns_of(patterns, names, f"value of `{key}`").items():
            own, value = module.get_submodule(name), values[pattern][key]
            if type(before := value_of(own, key)) is not int or not can_be_set(own, key, value):
                told = f"is a property that computes {before}" if type(before) is int else f"is {before!r}"
                raise ConfigError(
                    f"`{key}` of `{name}` must be a whole number that the plan divides, but {told}. Correct or remove "
                    "the line."
                )
            found.setdefault(name, {})[key] = value
    return found
