"""Wires between matrices: whose outputs reach whose inputs, without another matrix between.

The outputs of all matrices are leaves of autograd, so a gradient that arrives at a leaf has passed no other matrix.
"""

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


_Side = tuple[str, str]
"""Kind of layer, and whether its inputs or its outputs are meant."""


def pattern_of(name: str) -> str:
    """Name with `*` for numbers."""
    return next(iter(patterns([name])))


def find_wires(draw: Draw) -> Wires:
    """Find all direct ways, by one forward pass and one short backward pass for each call."""
    leaves: dict[Call, Tensor] = {}

    def reply(call: Call) -> Tensor:
        leaves[call] = draw.outputs[call].clone().requires_grad_()
        return leaves[call] * 1  # no leaf itself, so that the module may change it in place

    wires, names = Wires(), {each: name for name, each in draw.subject.module.named_parameters()}
    parameters = list(names)
    frozen = [each for each in parameters if not each.requires_grad]
    for each in frozen:
        each.requires_grad_()
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
    for each in frozen:
        each.requires_grad_(False)
    return wires


def find_groups(wires: Wires, draw: Draw) -> list[Group]:
    """Divide the wires into groups: those of equal layers, and those of several calls of a module, belong together.
    Layers are equal if their names differ only in numbers, their weights have one shape, and the
    modules that hold them have the same classes.
    """
    above: dict[_Side, _Side] = {}
    module, kinds = draw.subject.module, dict[str, str]()

    def side(call: Call, end: str) -> _Side:
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
