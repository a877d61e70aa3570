"""Random draws of dropout on each rank, observed from outside the modules.

An operator call that changes the state of the random generator is a draw. For each draw, this module finds the tensor
from which dropout removes elements. The rule of the Megatron-LM paper (arXiv 1909.08053, section 3.1) can then be
checked without a list of the modules that apply dropout: ranks that drop from the same tensor must draw the same
numbers, and ranks that hold different tensors, or see different data, must draw different numbers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import Layout
from crosscut.config.axes import AXES
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import gather_to_first
from crosscut.parallel.linear import is_recomputing
from crosscut.parallel.mesh import layout_of
from crosscut.parallel.recorder import comes_again
from crosscut.verification.recording import display_name


class Draw(NamedTuple):
    """One use of the random generator."""

    module: str
    """Name of the innermost module that was running."""
    state: str
    """Digest of the generator's state before the draw. Equal states give equal numbers."""
    dropped: str
    """Digest of the tensor from which elements are dropped; empty if the tensor could not be found."""
    operator: str = ""
    """Name of the operator that made the draw, and its dropout probabilities."""


class Disagreement(NamedTuple):
    """First two draws, on two ranks, that break the rule in the module's docstring. `told` describes how they break the
    rule.
    """

    module: str
    ranks: tuple[int, int]
    told: str


def draws_of(model: nn.Module, mesh: ParallelMesh, forward: Callable[[], object]) -> list[Draw]:
    """Run `forward` and return the draws of this rank, in order. The model must be in training mode."""
    with _Draws(model, mesh) as drawn:
        forward()
    return drawn.draws


def compare_draws(mine: list[Draw], mesh: ParallelMesh) -> Disagreement | None:
    """Compare the draws of all ranks. Every rank must call this function. On the first rank, the result is the first
    disagreement, or None if all ranks agree. On the other ranks, the result is None.
    """
    every = gather_to_first(mine)
    return None if every is None else first_disagreement(every, layout_of(mesh))


def draws_of_stages(mine: list[Draw], mesh: ParallelMesh) -> list[Draw] | None:
    """Gather the draws of each pipeline stage's first rank. The first rank gets these draws, stage by stage, and the
    other ranks get None. Without a pipeline, every rank gets `mine`. Every rank must call this function.
    """
    if mesh.pipeline is None:
        return mine
    every = gather_to_first(mine)
    size = 0 if every is None else len(every) // mesh.pipeline.size
    return None if every is None else [draw for of_rank in every[::size] for draw in of_rank]


def first_disagreement(draws: Sequence[Sequence[Draw]], layout: Layout) -> Disagreement | None:
    """Compare the draws of all ranks of a layout, draw by draw. Returns the first disagreement, or None if the ranks
    agree.

    `draws` holds one list of draws per rank, in the order of the ranks.
    """
    size = layout.world_size // layout.pipeline  # ranks of a stage are adjacent; stages draw for different layers
    for first in range(0, layout.world_size, size):
        found = _first_on_stage(draws[first : first + size], layout, first)
        if found is not None:
            return found
    return None


def _first_on_stage(draws: Sequence[Sequence[Draw]], layout: Layout, first: int) -> Disagreement | None:
    """Compare the draws of the ranks on one pipeline stage. `first` is the number of the stage's first rank."""
    splits_tokens = [row.name for row in AXES if row.splits_tokens]
    data = [[layout.place_of(rank)[name] for name in splits_tokens] for rank in range(len(draws))]
    for together in zip(*draws, strict=False):
        for (i, one), (j, other) in combinations(enumerate(together), 2):
            if told := _judge(one, other, same_data=data[i] == data[j]):
                return Disagreement(one.module, (first + i, first + j), told)
    counts = [len(of_rank) for of_rank in draws]
    if len(set(counts)) > 1:
        j = next(j for j, count in enumerate(counts) if count != counts[0])
        longest = max(draws, key=len)
        return Disagreement(longest[min(counts)].module, (first, first + j), "make different numbers of draws")
    return None


def _judge(one: Draw, other: Draw, *, same_data: bool) -> str:
    """Describe how the draws of two ranks break the rule. The text is empty if the draws follow the rule."""
    if not same_data:
        return "see different data but draw the same numbers" if one.state == other.state else ""
    if not one.dropped or not other.dropped:
        return ""
    if one.dropped == other.dropped and one.state != other.state:
        return "drop from the same tensor but draw different numbers, so their replicas drift apart"
    if one.dropped != other.dropped and one.state == other.state:
        return "drop from different tensors but draw the same numbers, so the dropped elements are correlated"
    return ""


class _Draws(TorchDispatchMode):
    """Context that records every draw inside a module's forward call. Draws outside all modules are ignored, because
    they only make the batch.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        """All draws, in order."""
        self._device = mesh.device
        self._model = model
        self._running: list[str] = []
        self._noise: dict[int, tuple[Tensor, frozenset[int]]] = {}
        """Tensors computed from random numbers alone, each with the draws of these numbers, keyed by the tensor's id.
        The tensors are kept alive so that no other tensor gets the same id.
        """
        self._hooks: Any = None

    def __enter__(self) -> Self:
        self._hooks = self._module_names()
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._hooks.__exit__(*failure)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and record a draw if the operator changed the state of the random generator."""
        if comes_again(types):
            return NotImplemented
        if is_recomputing():  # a recomputed module repeats draws that were noted before
            return func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            unmet = self._meet(args) if self._noise else frozenset()
            result = func(*args, **(kwargs or {}))
            if unmet:
                self._hold(result, unmet)
            return result
        generator = (kwargs or {}).get("generator")
        before = self._state(generator)
        source = next((a for a in args if isinstance(a, Tensor)), None)
        digest = _digest(source) if source is not None and _is_fused(func) else ""
        result = func(*args, **(kwargs or {}))
        if self._running and self._state(generator) != before:  # attention without dropout, for example, does not draw
            state = hashlib.blake2b(before, digest_size=8).hexdigest()
            probabilities = [a for a in args if isinstance(a, float)]
            self.draws.append(Draw(self._running[-1], state, digest, f"{func.name()} {probabilities}"))
            if not digest:  # the dropped tensor is known once another operator combines the numbers with it
                self._hold(result, frozenset([len(self.draws) - 1]))
        return result

    def _hold(self, made: Any, draws: frozenset[int]) -> None:
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self._noise[id(tensor)] = (tensor, draws)

    def _meet(self, args: tuple[Any, ...]) -> frozenset[int]:
        """If an operator combines random numbers with another tensor, record this tensor as the one from which the
        draws of these numbers drop elements. Call this before the operator runs.

        If there is no other tensor, return the draws on which the operator's result depends.
        """
        tensors = [a for a in args if isinstance(a, Tensor)]
        draws = frozenset[int]().union(*(self._noise[id(t)][1] for t in tensors if id(t) in self._noise))
        others = [t for t in tensors if id(t) not in self._noise and t.numel() > 1]
        if not draws or not others:
            return draws
        for index in draws:
            if not self.draws[index].dropped:
                self.draws[index] = self.draws[index]._replace(dropped=_digest(others[0]))
        return frozenset()

    def _state(self, generator: torch.Generator | None) -> bytes:
        """Return the state of the given generator, or of all default generators that an operator may use."""
        states = [torch.get_rng_state()] if generator is None else [generator.get_state()]
        if generator is None and self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return b"".join(state.numpy().tobytes() for state in states)

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        def enter(name: str) -> Callable[..., None]:
            return lambda *_: None if is_recomputing() else self._running.append(name)

        def leave(*_: object) -> None:
            if not is_recomputing():
                self._running.pop()

        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name or display_name(self._model))))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_fused(func: Any) -> bool:
    """Whether an operator draws random numbers and drops elements in one call."""
    return "dropout" in func.name() or "attention" in func.name()


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, digest_size=8
    ).hexdigest()
