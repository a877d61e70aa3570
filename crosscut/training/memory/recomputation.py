"""Activations that the backward pass computes again, because keeping them takes more memory than they are worth.

| `training.recompute` | a layer keeps                                 | the backward pass runs again        |
|----------------------|-----------------------------------------------|-------------------------------------|
| `none`               | all that autograd saves                       | nothing                             |
| `selective`          | all but the inside of the attention core      | scores, softmax, dropout and values |
| `operators`          | inputs, what products and attention gave      | norms and what follows an expansion |
| `full`               | its input                                     | the layer, but for its last product |

The classes here are calls of a layer's `Runner`, so modules have the names, parameters and hooks of the plain model.
Nothing changes in the numbers, dropout included: a repetition draws what the first pass drew.

Sources: Chen et al. 2016 (arXiv 1604.06174) and the paper, section 4.1.1, for whole layers; Korthikanti et al. 2022
(arXiv 2205.05198), section 5, for the attention core.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from crosscut.kernels.functions import Call, call
from crosscut.parallel import RandomStreams
from crosscut.training.memory.host_activations import HostActivations


@final
class Recomputed:
    """Calls a function of which only the inputs are kept; the backward pass calls it again.

    `call` makes both calls. With a `host` the inputs wait in host memory.
    """

    def __init__(self, streams: RandomStreams, *, call: Call = call, host: HostActivations | None = None) -> None:
        self._streams, self._call, self._host = streams, call, host

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `function(*inputs)`."""
        if not torch.is_grad_enabled():
            return self._call(function, *inputs)
        with nullcontext() if self._host is None else self._host.instead_of_device():
            y: Tensor = checkpoint(
                partial(self._call, function),
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=self._contexts,
            )
        return y

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _SameNumbers(self._streams)


class _SameNumbers(AbstractContextManager[None]):
    """A context in which both random streams begin where they were when it was made; it may be entered many times."""

    def __init__(self, streams: RandomStreams) -> None:
        self._streams, self._place = streams, streams.place()
        self._inside: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._inside.append(self._streams.repeated_from(self._place))
        self._inside[-1].__enter__()

    def __exit__(self, *failure: object) -> bool | None:
        return self._inside.pop().__exit__(*failure)  # type: ignore[arg-type]


class _Recipe(NamedTuple):
    """Recipe to compute a tensor again, from sources that autograd keeps anyway for the cheap operator."""

    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    """Version counters of the sources when they were used."""


@final
class CheapOutputs:
    """Calls a layer and the cheap functions inside it; autograd saves the recipe of a cheap output in its place.

    An output that was changed after its function returned, or replaced by a hook, is saved as a tensor, as without
    recipes. The layers of a model run one after the other, so they may share one object.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[ReferenceType[Tensor], int, _Recipe]] = {}
        """Output, its version and its recipe, by the storage, which is the output's own."""

    def layer(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return the output of a layer, inside which autograd saves recipes."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            try:
                return function(*inputs)
            finally:
                self._made.clear()

    def cheap(self, function: Callable[..., Tensor], *sources: Tensor) -> Tensor:
        """Return the output of a cheap function, and note its recipe."""
        y = function(*sources)
        if torch.is_grad_enabled():
            recipe = _Recipe(function, tuple(x.detach() for x in sources), tuple(x._version for x in sources))
            self._made[_storage(y)] = (ref(y), y._version, recipe)
        return y

    def _pack(self, saved: Tensor) -> Tensor | _Recipe:
        """Recipe of a tensor that autograd saves, where it has one; otherwise the tensor."""
        if (found := self._made.get(_storage(saved))) is None:
            return saved
        output, version, recipe = found
        made = output()
        is_same = (
            made is not None
            and saved._version == version
            and (saved.shape, saved.stride(), saved.dtype) == (made.shape, made.stride(), made.dtype)
        )
        return recipe if is_same else saved

    def _unpack(self, kept: Tensor | _Recipe) -> Tensor:
        """The tensor that was to be saved."""
        if isinstance(kept, Tensor):
            return kept
        if tuple(source._version for source in kept.sources) != kept.versions:
            raise RuntimeError(
                'A layer\'s activations must not be changed in place under training.recompute="operators", but one '
                "was between the forward and the backward pass. Change a copy."
            )
        with torch.no_grad():
            return kept.make(*kept.sources)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
