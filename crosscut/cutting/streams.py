"""Random numbers of dropout in a cut module.

From the layers that are cut by columns to the layer that is cut by rows, ranks hold different values and must draw
different numbers; everywhere else they must draw the same ones. The module's own code draws from PyTorch's default
generator, so this generator is seeded at the borders of such a region. Both seeds follow from the generator's state at
the border. The seed inside also has a mark and the rank's number, so the generator itself says whether the code is
inside of a region, and from which state the region began. A recomputation that restores the generator's state, as
`torch.utils.checkpoint` does, therefore draws the same numbers again, whichever part of a region it repeats.

    seed inside of a region     | mark: 16 bits | rank: 16 bits | base + rank * _STEP: 32 bits |
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from crosscut.parallel import ParallelMesh

_MARK = 0x5CC7 << 48
_STEP = 0x9E3779B9
"""Odd number, so that the lowest 32 bits, which are all that a generator on the CPU uses, differ between ranks."""


class DropoutRate(NamedTuple):
    """Dropout probability of a module."""

    module: nn.Module
    holder: Any
    """The module, or its `config`."""
    name: str
    """Attribute of the holder."""

    def is_used(self) -> bool:
        """Whether the module drops now."""
        rate = getattr(self.holder, self.name, None)
        return self.module.training and isinstance(rate, int | float) and rate > 0


def dropout_rates(module: nn.Module) -> list[DropoutRate]:
    """Find the dropout probabilities of a module, which may be 0: numbers in attributes, or in attributes of its
    `config`, whose names contain "drop", and a dropout layer's `p`. A probability that stands only in the code of a
    `forward` is not seen; a proof finds its draws.
    """
    return [
        DropoutRate(each, holder, name)
        for each in module.modules()
        for holder in (each, vars(each).get("config"))
        for name, value in getattr(holder, "__dict__", {}).items()
        if type(value) in (int, float)
        if "drop" in name or (name == "p" and holder is each and "drop" in type(each).__name__.lower())
    ]


class Streams:
    """Random streams of one cut module: inside and outside of its regions."""

    def __init__(self, mesh: ParallelMesh, rates: Sequence[DropoutRate]) -> None:
        self._rank = mesh.tensor.rank
        self._device = mesh.device
        self._rates = rates
        self._draws: bool | None = None
        """Whether the module drops in its present forward pass. If not, the generator is never seeded, so that a
        compiler can trace the code. None if the whole module does not run.
        """
        self._open: tuple[int | None, frozenset[str]] = (None, frozenset())
        """Base of the last region, and the names of the regions in which the code runs."""
        self._bases: list[int | None] = []
        """Bases of the regions inside of which modules draw as if they were outside: one for each of the modules that
        run, None for a module that runs outside.
        """

    def begin(self) -> None:
        """Note that a forward pass of the whole module begins."""
        self._draws = any(rate.is_used() for rate in self._rates)
        if self._draws:
            self._begin()

    def end(self) -> None:
        """Note that the forward pass has ended."""
        self._draws = None

    def enter(self, regions: frozenset[str]) -> None:
        """Note that the code is inside of `regions`, and give each rank a stream of its own."""
        if regions and self._is_drawing():
            self._enter(regions)

    def leave(self, regions: frozenset[str]) -> None:
        """Note that the code has left `regions`. If it is in no other region, all ranks have the same stream again."""
        if regions and self._is_drawing():
            self._leave(regions)

    def outside(self) -> None:
        """Give all ranks the same stream until `inside`, for a module within a region that computes on whole values."""
        if self._is_drawing():
            self._outside()

    def inside(self) -> None:
        """Give each rank its own stream again."""
        if self._is_drawing():
            self._inside()

    def _is_drawing(self) -> bool:
        return any(rate.is_used() for rate in self._rates) if self._draws is None else self._draws

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self) -> None:
        if (base := self._base()) is not None:  # a recomputation has ended inside of a region
            self._seed_outside(base)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, regions: frozenset[str]) -> None:
        base = self._base()
        if base is None:
            base = _hash(self._state())
            self._seed_inside(base)
            self._open = (base, frozenset())
        self._open = (base, self._regions(base) | regions)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, regions: frozenset[str]) -> None:
        base = self._base()
        if base is None or ((before := self._regions(base)) and not before & regions):
            return
        self._open = (base, before - regions)
        if not before - regions:
            self._seed_outside(base)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside(self) -> None:
        self._bases.append(base := self._base())
        if base is not None:
            self._seed_outside(base)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _inside(self) -> None:
        if self._bases and (base := self._bases.pop()) is not None:
            new = _hash(self._state() + base.to_bytes(4, "little"))
            self._seed_inside(new)
            self._open = (new, self._regions(base))

    def _regions(self, base: int) -> frozenset[str]:
        """Return the regions that began from a base and are open. None are known in a recomputation that begins inside
        of a region.
        """
        return self._open[1] if self._open[0] == base else frozenset()

    def _base(self) -> int | None:
        """Return the base of the region inside of which the code runs, None outside."""
        seed = self._generator().initial_seed()
        return (seed - self._rank * _STEP) % 2**32 if seed >> 48 == _MARK >> 48 else None

    def _seed_inside(self, base: int) -> None:
        self._generator().manual_seed(_MARK | self._rank << 32 | (base + self._rank * _STEP) % 2**32)

    def _seed_outside(self, base: int) -> None:
        self._generator().manual_seed(_hash(base.to_bytes(4, "little")))

    def _state(self) -> bytes:
        state: bytes = self._generator().get_state().numpy().tobytes()
        return state

    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            index = self._device.index
            return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        return torch.default_generator


def _hash(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=4).digest(), "little")
