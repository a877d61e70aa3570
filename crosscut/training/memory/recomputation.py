"""Recomputation: the backward pass computes activations again instead of keeping them, which saves memory.

| `training.recompute` | a layer keeps                                    | the backward pass runs again               |
|----------------------|--------------------------------------------------|--------------------------------------------|
| `none`               | everything that autograd saves                   | nothing                                    |
| `selective`          | everything except the inside of attention, scans | scores, softmax, dropout and values; scans |
| `operators`          | inputs, outputs of products, attention and scans | norms and activation functions             |
| `full`               | its input                                        | the whole layer except its last product    |

A layer's `Runner` calls the layer through the classes in this file, so the names, parameters and hooks of modules do
not change. Results do not change either, even with dropout: the second pass draws the same random numbers as the first
pass.

Sources: Chen et al. 2016 (arXiv 1604.06174) and the paper, section 4.1.1, for whole layers; Korthikanti et al. 2022
(arXiv 2205.05198), section 5, for the attention core.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeVar, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from crosscut.kernels.functions import LayerCaller, call
from crosscut.parallel import RandomStreams
from crosscut.training.memory.host_activations import HostActivations

_T = TypeVar("_T")


@final
class Recomputed:
    """Callable that runs a function and keeps only the function's inputs. The backward pass runs the function again.

    In both passes, the function runs through `call(function, *inputs)`. With `host`, the inputs are kept in host
    memory.
    """

    def __init__(
        self, streams: RandomStreams, *, call: LayerCaller = call, host: HostActivations | None = None
    ) -> None:
        self._streams, self._call, self._host = streams, call, host

    def __call__(self, function: Callable[..., _T], *inputs: object) -> _T:
        """Return `function(*inputs)`."""
        if not torch.is_grad_enabled():
            return self._call(function, *inputs)
        with nullcontext() if self._host is None else self._host.instead_of_device():
            y: _T = checkpoint(
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
    """Context in which the random streams start from the positions that they had when this object was created. The
    context can be entered many times.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams, self._place = streams, streams.place()
        self._inside: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._inside.append(self._streams.repeated_from(self._place))
        self._inside[-1].__enter__()

    def __exit__(self, *failure: object) -> bool | None:
        return self._inside.pop().__exit__(*failure)  # type: ignore[arg-type]


class _Recipe(NamedTuple):
    """Recipe for recomputing a tensor from the inputs of the cheap function that returned it. Autograd keeps these
    inputs anyway.
    """

    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    """Version counters of the inputs (`sources`) when the function was called."""


@final
class CheapOutputs:
    """Two methods that call a layer (`layer`) and the cheap functions inside the layer (`cheap`). Autograd saves a
    recipe for recomputing the output of a cheap function, instead of the output itself.

    If an output was changed in place after the function returned, or was replaced by a hook, autograd saves the tensor
    itself. The layers of a model run one after the other, so they can share one object.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[ReferenceType[Tensor], int, _Recipe]] = {}
        """Output, version counter and recipe of each call of a cheap function, keyed by the output's storage."""

    def layer(self, function: Callable[..., _T], *inputs: object) -> _T:
        """Return the output of a layer. During the call, autograd saves recipes instead of the outputs of cheap
        functions.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            try:
                return function(*inputs)
            finally:
                self._made.clear()

    def cheap(self, function: Callable[..., Tensor], *sources: Tensor) -> Tensor:
        """Return the output of a cheap function, and record the recipe for recomputing this output."""
        y = function(*sources)
        if torch.is_grad_enabled():
            recipe = _Recipe(function, tuple(x.detach() for x in sources), tuple(x._version for x in sources))
            self._made[_storage(y)] = (ref(y), y._version, recipe)
        return y

    def _pack(self, saved: Tensor) -> Tensor | _Recipe:
        """Return the recipe of a tensor that autograd saves, or the tensor itself if there is no valid recipe."""
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
        """Return a saved tensor, or recompute the tensor from its recipe."""
        if isinstance(kept, Tensor):
            return kept
        if tuple(source._version for source in kept.sources) != kept.versions:
            raise RuntimeError(
                'A layer\'s activations must not be changed in place under training.recompute="operators", but an '
                "activation was changed between the forward and the backward pass. Change a copy instead."
            )
        with torch.no_grad():
            return kept.make(*kept.sources)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
