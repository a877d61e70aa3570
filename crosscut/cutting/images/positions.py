"""Check that a function computes each position of an image on its own.

PyTorch runs every function as a sequence of operators, and marks the operators that work element by element. This check
watches the sequence. It accepts marked operators, operators that work along batch or channels, and copies. Everything
else is refused, also what nobody has thought of.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import LayoutError
from crosscut.cutting.images.places import told_place

_ELEMENTWISE = {
    *("_prelu_kernel", "_to_copy", "alias", "copy_", "detach", "empty_like", "fill_", "full_like", "hardsigmoid"),
    *("hardsigmoid_", "hardswish", "hardswish_", "log_sigmoid_forward", "ones_like", "zeros_like"),
}
"""Operators that PyTorch does not mark, but that work element by element or copy."""

_ALONG = {
    *("_log_softmax", "_softmax", "amax", "amin", "argmax", "argmin", "cat", "cumprod", "cumsum", "flip", "glu"),
    *("index_select", "linalg_vector_norm", "logcumsumexp", "logsumexp", "max", "mean", "min", "roll", "select"),
    *("slice", "sort", "split", "split_with_sizes", "squeeze", "std", "sum", "topk", "transpose", "unbind"),
    *("unsqueeze", "var"),
}
"""Operators that work along the dimensions that they are given."""

_OF_CHANNELS = {"channel_shuffle", "native_channel_shuffle"}
_VIEWS = {"_unsafe_view", "expand", "view"}
_MAKES = {"new_empty", "new_full", "new_ones", "new_zeros"}
"""Operators that return a tensor without the values of their argument."""
_DIMS = ("dim", "dims", "dim0", "dim1")


class PositionsKept(TorchDispatchMode):
    """Context in which operators on parts of images, and on what was computed of them, must compute each position on
    its own. Raises `LayoutError` for another operator; `name` is the function that calls it.
    """

    def __init__(self, name: str, parts: Iterable[Tensor], num_directions: int) -> None:
        super().__init__()
        self._name, self._num = name, num_directions
        self._kept: list[Tensor] = []
        """Tensors whose memory is known. They are kept, so that no other tensor gets the same memory."""
        self._memory: set[int] = set()
        for part in parts:
            self._sizes = part.shape[-num_directions:]
            self._note(part)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor has positions of the image."""
        return _memory_of(tensor) in self._memory

    def __torch_dispatch__(
        self,
        func: OpOverload,
        _types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator if it keeps positions."""
        tensors = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        parts = [each for each in tensors if self.has(each)]
        name = func.overloadpacket.__name__
        if parts and name not in _MAKES:
            self._require(func, args, kwargs or {}, parts=parts)
            if name != "index_select":  # whose index has no positions
                self._require_few_positions(each for each in tensors if not self.has(each))
        result = func(*args, **(kwargs or {}))
        if parts and name not in _MAKES:
            for each in _pytree.tree_leaves(result):
                if isinstance(each, Tensor):
                    self._require_positions(each)
                    self._note(each)
        return result

    def _note(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self._memory.add(_memory_of(tensor))

    def _require(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], *, parts: list[Tensor]
    ) -> None:
        for part in parts:
            self._require_positions(part)
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refused(self._name, "draw no random numbers, which ranks would draw for other positions, but draws")
        if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE | _OF_CHANNELS | _VIEWS:
            return
        if name not in _ALONG:
            raise _refused(self._name, f"compute each position on its own, but `{name}` is not known to do so")
        if not self._is_beside(func, args, kwargs, parts[0].dim() + (name == "unsqueeze")):
            raise _refused(self._name, f"compute each position on its own, but `{name}` mixes positions or moves them")

    def _is_beside(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], num_dims: int) -> bool:
        """Whether an operator works along none of the directions of the image."""
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
        defaults = {each.name: each.default_value for each in func._schema.arguments}
        asked = [given.get(name, defaults[name]) for name in _DIMS if name in defaults]
        dims = [dim for each in asked for dim in (each if isinstance(each, list | tuple) else [each])]
        return bool(dims) and all(isinstance(dim, int) and dim % num_dims < num_dims - self._num for dim in dims)

    def _require_positions(self, tensor: Tensor) -> None:
        if tensor.shape[-self._num :] != self._sizes or tensor.dim() < self._num:
            raise _refused(
                self._name,
                f"keep the positions of a part, {_shown(self._sizes)}, but makes or takes "
                f"values of the shape {_shown(tensor.shape)} of it",
            )

    def _require_few_positions(self, others: Iterable[Tensor]) -> None:
        """Require that tensors which are no parts have the same values at all positions."""
        for other in others:
            if any(size != 1 for size in other.shape[-self._num :]):
                raise _refused(
                    self._name,
                    "combine parts only with parts, and with values that are the same at all "
                    f"positions, but combines one with whole values of the shape {_shown(other.shape)}",
                )


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shown(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "()"


def _refused(name: str, what: str) -> LayoutError:
    return LayoutError(
        f"`{name}` of an image that ranks share must {what}, {told_place()}. Give the module that calls it a rule of "
        "the plan (`spatial`), or gather the image before (`spatial_gather_output`)."
    )
