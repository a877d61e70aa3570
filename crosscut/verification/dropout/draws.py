"""Random draws of dropout on each rank, observed from outside the modules.

An operator call that changes the state of the random generator is a draw. For each draw, this module notes the state of
the generator, and finds the tensor from which dropout removes elements. `draw_rules` compares the draws of all ranks.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.model import GPT
from crosscut.parallel import ParallelMesh
from crosscut.parallel.linear import is_recomputing
from crosscut.parallel.recorder import comes_again
from crosscut.verification.watching import MicroBatches, display_name


class DropoutDraw(NamedTuple):
    """One use of the random generator."""

    module: str
    """Name of the innermost module that was running; empty if a recomputation made the draw."""
    state: str
    """Digest of the generator's state before the draw. Equal states give equal numbers."""
    dropped: str
    """Digest of the tensor from which elements are dropped; empty if the tensor could not be found."""
    operator: str = ""
    """Name of the operator that made the draw, and its dropout probabilities."""
    micro_batch: int = 1
    """Number of the micro-batch, from 1, during whose forward pass the draw was made. 1 if the model is not a `GPT`."""


class ModuleEntry(NamedTuple):
    """One forward call of a module."""

    module: str
    micro_batch: int
    """Number of the micro-batch, from 1."""
    call: int
    """Number of the call in this micro-batch, from 1."""


class Drawn(NamedTuple):
    """Draws of one rank in one step."""

    draws: list[DropoutDraw]
    """Draws of all forward passes, in order."""
    repeated: list[DropoutDraw]
    """Draws of recomputations, in order."""
    states: dict[ModuleEntry, str]
    """Digest of the default generator's state at the start of each forward call of a module."""
    restarts: list[ModuleEntry]
    """Calls before which the default generator was set to a new state, in order. Complete only on a rank with one
    random stream. Empty if the model is not a `GPT`.
    """


def draws_of(model: nn.Module, mesh: ParallelMesh, forward: Callable[[], object]) -> Drawn:
    """Run `forward` and return the draws of this rank. The model must be in training mode."""
    with _Draws(model, mesh) as drawn:
        forward()
    return drawn.drawn()


class _Draws(TorchDispatchMode):
    """Context that records every draw inside a module's forward call, and every draw of a recomputation. Other draws
    are ignored, because they only make the batch.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        super().__init__()
        self._draws: list[DropoutDraw] = []
        """All draws, in order. The module of a recomputed draw is empty."""
        self._states: dict[ModuleEntry, str] = {}
        self._restarts: list[ModuleEntry] = []
        self._calls: Counter[tuple[str, int]] = Counter()
        self._device = mesh.device
        self._last = self._state(None)
        """State of the default generator at the last observation."""
        self._model, self._micro_batches = model, MicroBatches(model)
        self._running: list[str] = []
        self._noise: dict[int, tuple[Tensor, frozenset[int]]] = {}
        """Tensors computed from random numbers alone, each with the draws of these numbers, keyed by the tensor's id.
        The tensors are kept alive so that no other tensor gets the same id.
        """
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            entered = partial(self._enter, name or display_name(self._model))
            self._hooks.enter_context(module.register_forward_pre_hook(entered))
            self._hooks.enter_context(module.register_forward_hook(self._leave))
        self._hooks.enter_context(self._micro_batches)
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._hooks.close()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the operator, and record a draw if the operator changed the state of the random generator."""
        if comes_again(types):
            return NotImplemented
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
        after = self._state(generator)
        self._last = after if generator is None else self._last
        if after != before and (self._running or is_recomputing()):  # attention without dropout does not draw
            module = "" if is_recomputing() else self._running[-1]
            operator = f"{func.name()} {[a for a in args if isinstance(a, float)]}"
            self._draws.append(DropoutDraw(module, _digest_of(before), digest, operator, self._micro_batches.current))
            if not digest:  # the dropped tensor is known once another operator combines the numbers with it
                self._hold(result, frozenset([len(self._draws) - 1]))
        return result

    def drawn(self) -> Drawn:
        """Return what was recorded."""
        forward, repeated = ([draw for draw in self._draws if bool(draw.module) is made] for made in (True, False))
        return Drawn(forward, repeated, self._states, self._restarts)

    def _hold(self, made: object, draws: frozenset[int]) -> None:
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self._noise[id(tensor)] = (tensor, draws)

    def _meet(self, args: tuple[object, ...]) -> frozenset[int]:
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
            draw = self._draws[index]  # a backward pass combines gradients with the numbers of forward passes
            if not draw.dropped and is_recomputing() != bool(draw.module):
                self._draws[index] = draw._replace(dropped=_digest(others[0]))
        return frozenset()

    def _note_entry(self, module: str) -> None:
        place = (module, self._micro_batches.current)
        self._calls[place] += 1
        entry, state = ModuleEntry(*place, self._calls[place]), self._state(None)
        self._states[entry] = _digest_of(state)
        if state != self._last and isinstance(self._model, GPT):
            self._restarts.append(entry)
        self._last = state

    def _state(self, generator: torch.Generator | None) -> bytes:
        """Return the state of the given generator, or of all default generators that an operator may use."""
        states = [torch.get_rng_state()] if generator is None else [generator.get_state()]
        if generator is None and self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return b"".join(state.numpy().tobytes() for state in states)

    def _enter(self, module: str, *_: object) -> None:
        if not is_recomputing():
            self._running.append(module)
            self._note_entry(module)

    def _leave(self, *_: object) -> None:
        if not is_recomputing():
            self._running.pop()


def _is_fused(func: OpOverload) -> bool:
    """Whether an operator draws random numbers and drops elements in one call."""
    return "dropout" in func.name() or "attention" in func.name()


def _digest(tensor: Tensor) -> str:
    return _digest_of(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _digest_of(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
