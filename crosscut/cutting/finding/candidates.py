"""Integers and tables that may have to be divided between some layers: those that modules read there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crosscut.cutting.finding.playback import Call, Draw
from crosscut.cutting.finding.reads import Read, Reads
from crosscut.cutting.finding.wires import Group, Wires, pattern_of
from crosscut.cutting.looking.attributes import can_be_set, value_of


@dataclass(frozen=True)
class Candidates:
    """Values that were read between the columns and the rows of a group."""

    module: nn.Module
    group: Group
    reads: Reads

    @classmethod
    def between(cls, draw: Draw, group: Group, rows: Sequence[Call]) -> "Candidates":
        """Watch what modules read, from the call before the first column to the last of some rows. A module may read
        before it calls its first layer.
        """
        reads, awaited, calls = Reads(), {*rows}, draw.run.calls
        first = min(calls.index(call) for call in group.columns)
        reads.is_on = first == 0

        def reply(call: Call) -> Tensor:
            awaited.discard(call)
            reads.is_on = bool(awaited) and (reads.is_on or call == calls[first - 1])
            return draw.outputs[call].clone()

        module, matrices = draw.subject.module, draw.subject.matrices
        watched = {name: each for name, each in module.named_modules() if name not in matrices}
        with reads.watching(watched), torch.no_grad():
            draw.play(reply, stop={*rows})
        return cls(module, group, reads)

    def integers(self, sizes: Sequence[int]) -> dict[Read, dict[Read, int]]:
        """Return the integers that can be divided, each with those of equal modules."""
        found: dict[Read, dict[Read, int]] = {}
        for read, value in self.reads.integers.items():
            if value % min(sizes) or any(read in held for held in found.values()):
                continue
            if can_be_set(self.module.get_submodule(read.module), read.attribute, value // min(sizes)):
                found[read] = dict.fromkeys(self._of_equal_modules(read), value)
        return found

    def tables(self, wires: Wires, sizes: Sequence[int]) -> list[tuple[tuple[Read, ...], int]]:
        """Return the parameters that reach the rows, and the buffers, each with those of equal modules and with a
        dimension that all numbers of ranks divide.
        """
        owned = {name for name, _ in self.module.named_parameters()}
        reached = {name for name, ends in wires.parameters.items() if not ends.isdisjoint(self.group.rows)}
        found: dict[tuple[Read, ...], tuple[int, ...]] = {}
        for read in sorted(self.reads.tensors):
            if (name := f"{read.module}.{read.attribute}") not in owned or name in reached:
                found[tuple(self._of_equal_modules(read))] = tuple(self.reads.tensors[read].shape)
        return [
            (equal, at)
            for equal, shape in found.items()
            for at, width in enumerate(shape)
            if all(width % size == 0 for size in sizes)
        ]

    def _of_equal_modules(self, read: Read) -> list[Read]:
        """Return the attributes of equal modules: in other layers, with the same value or shape."""
        own, pattern = self.module.get_submodule(read.module), pattern_of(read.module)
        value = _size_of(value_of(own, read.attribute))
        return [
            Read(name, read.attribute)
            for name, each in self.module.named_modules()
            if pattern_of(name) == pattern
            and type(each) is type(own)
            and _size_of(value_of(each, read.attribute)) == value
        ]


def _size_of(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else value
