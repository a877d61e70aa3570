"""Watch for code that computes with parts of images where nobody sees it: scripted functions, `torch.vmap`,
`torch.tensor` and C++ code call no `__torch_function__`, and return tensors that are no parts.

During the first forward pass of a cut module, in training and in evaluation, every operator is watched: the functions
of a part run where `__torch_function__` is disabled, so an operator that gets a part elsewhere has escaped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import LayoutError
from crosscut.cutting.images.part import ImagePart
from crosscut.cutting.images.places import told_place


def watch_calls(module: nn.Module) -> None:
    """Watch the first forward pass of a cut module in each mode, training or not. A hook would not see the end of a
    pass that the user has interrupted.
    """
    kind: Any = type(module)
    module.__class__ = _watched(kind)
    vars(module)["escape_watch"] = Watch()


@cache
def _watched(kind: type[nn.Module]) -> type[nn.Module]:
    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        with vars(module)["escape_watch"].over(module):
            return kind.__call__(module, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


class Watch:
    """Watch over the forward passes of one cut module."""

    def __init__(self) -> None:
        self._seen: set[bool] = set()
        """Modes, training or not, in which a forward pass has ended without an error."""
        self._is_running = False
        """Whether a forward pass runs: a module may call itself."""
        self._escaped: LayoutError | None = None

    @contextmanager
    def over(self, module: nn.Module) -> Iterator[None]:
        """Context of a forward pass, which is watched if it is the first one in its mode. Raises `LayoutError` if a
        function has computed with a part unseen.
        """
        if self._is_running or module.training in self._seen:
            yield
            return
        is_training = module.training
        try:
            self._is_running, self._escaped = True, None
            with _Operators(self), _Functions(self):
                yield
            self.require_none()
            self._seen.add(is_training)
        finally:
            self._is_running = False

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
