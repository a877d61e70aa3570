"""Watch for code that computes with parts of images where nobody sees it: scripted functions, `torch.vmap`,
`torch.tensor` and C++ code call no `__torch_function__`, and return tensors that are no parts.

During the first forward pass of a cut module, in training and in evaluation, every operator is watched: the functions
of a part run where `__torch_function__` is disabled, so an operator that gets a part elsewhere has escaped.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import LayoutError
from crosscut.cutting.images.part import ImagePart
from crosscut.cutting.images.places import told_place


class Watch:
    """Watch over the forward passes of one cut module."""

    def __init__(self) -> None:
        self._seen: set[bool] = set()
        """Modes, training or not, in which a forward pass has ended without an error."""
        self._depth = 0
        """Number of forward passes that run: a module may call itself."""
        self._watching: ExitStack | None = None
        self._escaped: LayoutError | None = None

    def begin(self, module: nn.Module, *_: object) -> None:
        """Watch the forward pass that begins, if it is the first one in its mode."""
        self._depth += 1
        if self._depth > 1:
            return
        self._escaped = None
        if module.training not in self._seen:
            self._watching = ExitStack()
            self._watching.enter_context(_Operators(self))
            self._watching.enter_context(_Functions(self))

    def escape(self, name: str) -> None:
        """Note that a function has computed with a part unseen."""
        self._escaped = self._escaped or LayoutError(
            f"`{name}` must be called by Python code with a part of an image, but is called by a scripted function, "
            f"`torch.vmap`, `torch.tensor` or C++ code, whose results are no parts, {told_place()}. Call functions of "
            "PyTorch directly, or gather the image before (`spatial_gather_output`)."
        )

    def require_none(self) -> None:
        """Raise `LayoutError` if a function has computed with a part unseen."""
        if self._escaped is not None:
            raise self._escaped

    def note(self, module: nn.Module, *_: object) -> None:
        """Note that a forward pass has ended without an error."""
        self.require_none()
        if self._depth == 1:
            self._seen.add(module.training)

    def end(self, *_: object) -> None:
        """End the watch, also after an error."""
        self._depth -= 1
        if self._depth == 0 and self._watching is not None:
            self._watching.close()
            self._watching = None


class _Operators(TorchDispatchMode):
    """Finds escapes. The next function raises the error: TorchScript's interpreter would lose its text."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: OpOverload,
        _types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if torch._C._is_torch_function_enabled() and _has_part(args, kwargs):
            self._watch.escape(func.overloadpacket.__name__)
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Raises the error of an escape, and finds `torch.tensor`, which runs no operator on its argument."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., object],
        _types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.tensor and _has_part(args, kwargs):
            self._watch.escape("tensor")
        self._watch.require_none()
        return func(*args, **(kwargs or {}))


def _has_part(args: tuple[object, ...], kwargs: Mapping[str, object] | None) -> bool:
    return any(isinstance(each, ImagePart) for each in _pytree.tree_leaves((args, kwargs)))
