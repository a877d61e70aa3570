"""Activations that the backward pass computes again, because keeping them takes more memory than they are worth.

| `training.recompute` | a layer keeps                                 | the backward pass runs again        |
|----------------------|-----------------------------------------------|-------------------------------------|
| `none`               | all that autograd saves                       | nothing                             |
| `selective`          | all but the inside of the attention core      | scores, softmax, dropout and values |
| `operators`          | inputs, what products and attention gave      | norms and what follows an expansion |
| `full`               | its input                                     | the layer, but for its last product |

Layers stay the modules that they are: only functions inside them are replaced, so names, parameters and hooks are those
of the plain model. Nothing changes in the numbers, dropout included: a repetition draws what the first pass drew.

Sources: Chen et al. 2016 (arXiv 1604.06174) and the paper, section 4.1.1, for whole layers; Korthikanti et al. 2022
(arXiv 2205.05198), section 5, for the attention core.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from crosscut.config import RunConfig
from crosscut.launch.heap import LEAN_BYTES, give_freed_tensors_back
from crosscut.model import GPT
from crosscut.model.block import Block
from crosscut.parallel import RandomStreams
from crosscut.training.memory.host_activations import HostActivations

Cheap = Callable[..., Tensor]


def apply_recomputation(model: GPT, run: RunConfig) -> None:
    """Have every `training.recompute_every`-th layer, from the first, recompute as `training.recompute` says.

    Comes after compilation, whose code a recomputed layer runs as a whole; hooks of sharding stay outside. A process
    that recomputes whole layers on the CPU also keeps less of what it has freed.
    """
    training = run.training
    if training.recompute == "full" and model.mesh.device.type == "cpu":
        give_freed_tensors_back(LEAN_BYTES)
    host = HostActivations(model.mesh.device) if "activations" in training.offload else None
    for block in list(model.blocks)[:: training.recompute_every]:
        assert isinstance(block, Block)
        if training.recompute == "full":
            _recompute_layer(block, model.dropout.streams, host)
        elif training.recompute == "selective":
            _recompute_attention(block, model.dropout.streams)
        elif training.recompute == "operators":
            _recompute_operators(block)


def _recompute_layer(block: Block, streams: RandomStreams, host: HostActivations | None) -> None:
    forward = block.forward

    def recomputed(x: Tensor, *more: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *more)
        with nullcontext() if host is None else host.instead_of_device():
            return _checkpointed(forward, streams, x, *more)

    replaced: Any = recomputed
    block.forward = replaced  # type: ignore[method-assign]
    block.mlp.contract.ends_recomputation = True  # what comes after it, a residual sum, keeps nothing of its result


def _recompute_attention(block: Block, streams: RandomStreams) -> None:
    attend = block.attention._attend

    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled: fused, or refused (`compilation`)
            return attend(q, k, v)
        return _checkpointed(attend, streams, q, k, v)

    block.attention._attend = recomputed  # type: ignore[method-assign]


def _checkpointed(function: Callable[..., Tensor], streams: RandomStreams, *inputs: Any) -> Tensor:
    """`function(*inputs)`, of which only the inputs are kept."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _SameNumbers(streams)

    y: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return y


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


def _recompute_operators(block: Block) -> None:
    if (compiled := vars(block).get("compiled_forward")) is not None:
        compiled.recompute_operators()
        return
    cheap = _CheapOutputs()
    for place, name in ((block.attention_norm, "forward"), (block.mlp_norm, "forward"), (block.mlp, "_activate")):
        setattr(place, name, cheap.watched(getattr(place, name)))
    forward = block.forward

    def recomputed(x: Tensor, *more: Any) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(x, *more)
        with saved_tensors_hooks(cheap.pack, cheap.unpack):
            try:
                return forward(x, *more)
            finally:
                cheap.forget()

    replaced: Any = recomputed
    block.forward = replaced  # type: ignore[method-assign]


class _Recipe(NamedTuple):
    """Recipe to compute a tensor again, from sources that autograd keeps anyway for the cheap operator."""

    make: Cheap
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    """Version counters of the sources when they were used."""


class _CheapOutputs:
    """Outputs of the cheap functions of a running layer; in place of such an output autograd saves its recipe.

    An output that was changed after it was made, or replaced by a hook, is saved as a tensor, as without recipes.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[ReferenceType[Tensor], int, _Recipe]] = {}
        """Output, its version and its recipe, by the storage, which is the output's own."""

    def watched(self, function: Cheap) -> Cheap:
        """The function, with its outputs known here."""

        def run(*sources: Tensor) -> Tensor:
            y = function(*sources)
            if not torch.compiler.is_compiling() and torch.is_grad_enabled():
                recipe = _Recipe(function, tuple(x.detach() for x in sources), tuple(x._version for x in sources))
                self._made[_storage(y)] = (ref(y), y._version, recipe)
            return y

        return run

    def forget(self) -> None:
        """Drop all recipes: the layer has run."""
        self._made.clear()

    def pack(self, saved: Tensor) -> Tensor | _Recipe:
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

    def unpack(self, kept: Tensor | _Recipe) -> Tensor:
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
