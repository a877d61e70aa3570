"""Random numbers of dropout in a cut module.

From the layers that are cut by columns to the layer that is cut by rows, ranks hold different values and must draw
different numbers; everywhere else they must draw the same ones. The module's own code draws from PyTorch's default
generator, so this generator is switched at the borders of such a region. Both of its new states follow from its state
at the border: the state inside also from the rank, and the state after from nothing else. A recomputation that restores
the state before a layer, as `torch.utils.checkpoint` does, therefore draws the same numbers again.
"""

import hashlib

import torch
from torch import nn

from crosscut.parallel import ParallelMesh


class Streams:
    """Random streams of one cut module: inside and outside of its regions."""

    def __init__(self, mesh: ParallelMesh, *, draws: bool) -> None:
        self._rank = mesh.tensor.rank
        self._device = mesh.device
        self._draws = draws
        """Whether the module seems to apply dropout. If not, the generator is never switched, so that a compiler can
        trace the code.
        """
        self._open: set[str] = set()
        """Names of the regions in which the code runs."""
        self._after = 0
        """Seed of the generator after the region."""
        self._kept: list[torch.Tensor | None] = []
        """States of the generator inside of a region, while modules draw as if they were outside: one for each of the
        modules that run, None if the state was not changed for it.
        """

    def enter(self, regions: frozenset[str], *, is_training: bool) -> None:
        """Note that the code is inside of `regions`, and give each rank a stream of its own."""
        if self._draws and is_training and regions:
            self._enter(regions)

    def leave(self, regions: frozenset[str], *, is_training: bool) -> None:
        """Note that the code has left `regions`. If it is in no other region, all ranks have the same stream again."""
        if self._draws and is_training and regions:
            self._leave(regions)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, regions: frozenset[str]) -> None:
        if not self._open:
            generator = self._generator()
            state = generator.get_state().numpy().tobytes()
            self._after = _seed(state, "after")
            generator.manual_seed(_seed(state, f"rank {self._rank}"))
        self._open |= regions

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, regions: frozenset[str]) -> None:
        if self._open & regions:
            self._open -= regions
            if not self._open:
                self._generator().manual_seed(self._after)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def outside(self) -> None:
        """Give all ranks the same stream until `inside`, for a module within a region that computes on whole values."""
        is_first = bool(self._open) and not any(state is not None for state in self._kept)
        self._kept.append(self._generator().get_state() if is_first else None)
        if is_first:
            self._generator().manual_seed(self._after)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def inside(self) -> None:
        """Give each rank its own stream again."""
        if self._kept and (state := self._kept.pop()) is not None:
            self._after = _seed(self._generator().get_state().numpy().tobytes(), "after")
            self._generator().set_state(state)

    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            index = self._device.index
            return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        return torch.default_generator


def _seed(state: bytes, word: str) -> int:
    digest = hashlib.blake2b(state, digest_size=8, person=word.encode()).digest()
    return int.from_bytes(digest, "little") >> 1


def seems_to_draw(module: nn.Module) -> bool:
    """Whether a module has a dropout probability above 0: a number in an attribute, or in an attribute of its `config`,
    whose name contains "drop", or a dropout layer's `p`. A probability that stands only in the code of a `forward` is
    not seen; a proof finds its draws.
    """
    for each in module.modules():
        of_dropout = "drop" in type(each).__name__.lower()
        values = {**getattr(vars(each).get("config"), "__dict__", {}), **vars(each)}
        for name, value in values.items():
            if isinstance(value, float) and value > 0 and ("drop" in name or (of_dropout and name == "p")):
                return True
    return False
