"""Who draws which random numbers: dropout seen from outside, without asking the modules.

An operator that moves the random generator has drawn. With what it drops known, the paper's rule (section 3.1) needs no
list of places: ranks that drop from the same tensor must draw the same numbers, ranks that hold different tensors must
draw different ones.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import gather_to_first
from crosscut.parallel.recorder import comes_again
from crosscut.verification.recording import LOSS, display_name


class Draw(NamedTuple):
    """One use of the random generator."""

    module: str
    """The innermost module that was running."""
    state: str
    """The generator before it, as a digest: the same numbers follow from the same state."""
    dropped: str
    """The tensor from which elements are dropped, as a digest."""


class Disagreement(NamedTuple):
    """The first draw that breaks the rule."""

    module: str
    ranks: tuple[int, int]
    told: str


def compare_draws(
    model: nn.Module, mesh: ParallelMesh, forward: Callable[[], object]
) -> tuple[int, Disagreement | None]:
    """How often each rank drew while `forward` ran, and the first disagreement; known on the first rank only.

    Every rank calls it, with the model in training mode.
    """
    with _Draws(model, mesh) as drawn:
        forward()
    every = gather_to_first(drawn.draws)
    return (0, None) if every is None else (len(every[0]), first_disagreement(every))


def first_disagreement(draws: Sequence[Sequence[Draw]]) -> Disagreement | None:
    """Look through every rank's draws, in order."""
    for together in zip(*draws, strict=False):
        for (i, one), (j, other) in combinations(enumerate(together), 2):
            if one.dropped == other.dropped and one.state != other.state:
                told = "drop from the same tensor, but each draws its own numbers: their copies drift apart"
                return Disagreement(one.module, (i, j), told)
            if one.dropped != other.dropped and one.state == other.state:
                told = "drop from different tensors, but draw the same numbers: what is dropped is correlated"
                return Disagreement(one.module, (i, j), told)
    counts = [len(of_rank) for of_rank in draws]
    if len(set(counts)) > 1:
        j = next(j for j, count in enumerate(counts) if count != counts[0])
        longest = max(draws, key=len)
        return Disagreement(longest[min(counts)].module, (0, j), "do not draw equally often")
    return None


class _Draws(TorchDispatchMode):
    """A context that notes every draw inside it."""

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._device = mesh.device
        self._model = model
        self._running: list[str] = []
        self._noise: tuple[Tensor, str] | None = None
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
        """Let the operator run, and note it if it drew."""
        if comes_again(types):
            return NotImplemented
        if torch.Tag.nondeterministic_seeded not in func.tags:
            if self._noise is not None:
                self._match(args)
            return func(*args, **(kwargs or {}))
        before = self._state()
        source = next((a for a in args if isinstance(a, Tensor)), None)
        dropped = "" if source is None else _digest(source)
        result = func(*args, **(kwargs or {}))
        if self._state() != before:  # such as attention without dropout does not draw
            state = hashlib.blake2b(before, digest_size=8).hexdigest()
            if result is source and source is not None:  # noise drawn into an empty tensor; what it meets next tells
                self._noise = (source, state)
            else:
                self._note(state, dropped)
        return result

    def _match(self, args: tuple[Any, ...]) -> None:
        """See whether an operator brings the noise together with the tensor that it drops from."""
        assert self._noise is not None
        noise, state = self._noise
        tensors = [a for a in args if isinstance(a, Tensor)]
        others = [t for t in tensors if t is not noise and t.shape == noise.shape]
        if len(others) < len(tensors) and others:
            self._note(state, _digest(others[0]))
            self._noise = None

    def _note(self, state: str, dropped: str) -> None:
        self.draws.append(Draw(self._running[-1] if self._running else LOSS, state, dropped))

    def _state(self) -> bytes:
        cuda = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if cuda else torch.get_rng_state()
        return state.numpy().tobytes()

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        def enter(name: str) -> Callable[..., None]:
            return lambda *_: self._running.append(name)

        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name or display_name(self._model))))
            handles.append(module.register_forward_hook(lambda *_: self._running.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, digest_size=8
    ).hexdigest()
