"""Wires between matrices: whose outputs reach whose inputs, without another matrix between.

The outputs of all matrices are leaves of autograd, so a gradient that arrives at a leaf has passed no other matrix.
"""

from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crosscut.cutting.finding.playback import Call, Draw
from crosscut.cutting.plan import patterns


@dataclass
class Wires:
    """Direct ways between matrices."""

    sources: dict[Call, set[Call]] = field(default_factory=dict)
    """Calls whose outputs reach the input of a call."""
    result: set[Call] = field(default_factory=set)
    """Calls whose outputs reach what the module returns."""
    parameters: dict[str, set[Call | None]] = field(default_factory=dict)
    """Calls whose inputs a parameter reaches. None stands for what the module returns."""


@dataclass(frozen=True)
class Group:
    """Calls that are cut together: outputs that are cut by columns, and the inputs that they reach."""

    columns: tuple[Call, ...]
    rows: tuple[Call, ...]
    reaches_result: bool
    shared: tuple[Call, ...] = ()
    """Calls of layers that stay whole: the first part of their outputs leads to some of the columns' layers, the last
    part straight to the rows (latent attention).
    """


def without_inner(group: Group, wires: Wires) -> Group:
    """Group in which the layers are whole whose outputs lead to columns of the group itself."""
    names = {column.name for column in group.columns}
    inner = [row for row in group.rows if row.name in names]
    shared = {column for row in inner for column in wires.sources[row]}
    return Group(
        columns=tuple(column for column in group.columns if column not in shared),
        rows=tuple(row for row in group.rows if row not in inner),
        reaches_result=group.reaches_result,
        shared=tuple(column for column in group.columns if column in shared),
    )


def columns_to(draw: Draw, source: Call, ends: Container[Call]) -> list[int]:
    """Indices of the columns of a call's output that reach the inputs of some calls directly."""
    leaf = draw.outputs[source].clone().requires_grad_()
    with torch.enable_grad():
        run = draw.play(lambda call: leaf * 1 if call == source else draw.outputs[call].clone())
        weights = torch.Generator().manual_seed(0)
        reached = [
            (value * torch.randn(value.shape, dtype=value.dtype, generator=weights)).sum()
            for call, value in run.inputs.items()
            if call in ends and value.requires_grad
        ]
    if not reached:
        return []
    (gradient,) = torch.autograd.grad(torch.stack(reached).sum(), [leaf])
    return gradient.abs().flatten(0, -2).amax(0).nonzero().flatten().tolist()


_Side = tuple[str, str]
"""Kind of layer, and whether its inputs or its outputs are meant."""


def pattern_of(name: str) -> str:
    """Name with `*` for numbers."""
    return next(iter(patterns([name])))


def told_name(name: str) -> str:
    """Name of a module for a reader: with `*` for numbers, except for the last one of a name without letters."""
    outer, dot, last = name.rpartition(".")
    return pattern_of(name) if any(map(str.isalpha, name)) else f"{pattern_of(outer)}{dot}{last}"


def find_wires(draw: Draw) -> Wires:
    """Find all direct ways, by one forward pass and one short backward pass for each call."""
    leaves: dict[Call, Tensor] = {}

    def reply(call: Call) -> Tensor:
        leaves[call] = draw.outputs[call].clone().requires_grad_()
        return leaves[call] * 1  # no leaf itself, so that the module may change it in place

    wires, names = Wires(), {each: name for name, each in draw.subject.module.named_parameters()}
    parameters = list(names)
    with torch.enable_grad():
        run = draw.play(reply)
    ends: list[tuple[Call | None, Tensor]] = [*run.inputs.items(), *((None, each) for each in run.results)]
    for end, value in ends:
        if not value.requires_grad:
            continue
        calls = list(leaves)
        found = torch.autograd.grad(value.sum(), [*leaves.values(), *parameters], retain_graph=True, allow_unused=True)
        reached = {call for call, gradient in zip(calls, found, strict=False) if gradient is not None}
        if end is None:
            wires.result |= reached
        else:
            wires.sources[end] = reached
        for parameter, gradient in zip(parameters, found[len(calls) :], strict=True):
            if gradient is not None:
                wires.parameters.setdefault(names[parameter], set()).add(end)
    return wires


def find_groups(wires: Wires, draw: Draw, *, of_equal_layers: bool = True) -> list[Group]:
    """Divide the wires into groups: those of equal layers, and those of several calls of a module, belong together.
    Layers are equal if their names differ only in numbers, their weights have one shape, and the
    modules that hold them have the same classes. Without `of_equal_layers`, each layer is a group of its own.
    """
    above: dict[_Side, _Side] = {}
    module, kinds = draw.subject.module, dict[str, str]()

    def side(call: Call, end: str) -> _Side:
        if not of_equal_layers:
            return call.name, end
        if call.name not in kinds:
            names = call.name.split(".")
            shape = tuple(draw.subject.matrices[call.name].weight.shape)
            holders = [module.get_submodule(".".join(names[:number])) for number in range(1, len(names))]
            kinds[call.name] = " ".join([pattern_of(call.name), *(str(id(type(each))) for each in holders), str(shape)])
        return kinds[call.name], end

    def root(one: _Side) -> _Side:
        while (next_one := above.setdefault(one, one)) != one:
            one = next_one
        return one

    for row, columns in wires.sources.items():
        for column in columns:
            above[root(side(row, "in"))] = root(side(column, "out"))
    grouped: dict[_Side, tuple[list[Call], list[Call]]] = {}
    for call in draw.run.calls:
        for at, end in enumerate(("out", "in")):
            grouped.setdefault(root(side(call, end)), ([], []))[at].append(call)
    return [
        Group(tuple(columns), tuple(rows), reaches_result=not wires.result.isdisjoint(columns))
        for columns, rows in grouped.values()
        if columns and rows
    ]
