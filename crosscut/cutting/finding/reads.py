"""Integers, and tables by head, that modules read while they compute, and their replacement."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crosscut.cutting.looking.attributes import set_value

_IS_OF_PYTHON = 1 << 9
"""Flag of classes that are made by Python code, whose objects can change their class."""
_PLAIN = (nn.Module, Tensor, type, torch.dtype, torch.device)


class Read(NamedTuple):
    """Value that a module read of itself, or of an object that it holds (`config.num_heads`)."""

    module: str
    attribute: str


class Reads:
    """Values that modules read while they are watched."""

    def __init__(self) -> None:
        self.is_on = False
        self.integers: dict[Read, int] = {}
        self.tensors: dict[Read, Tensor] = {}
        self._holder: dict[int, Read] = {}
        """Module and attribute from which an object was read last, by its identity."""
        self._kinds: dict[type, type] = {}

    def spy(self, kind: type) -> type:
        """Return a class that reports what is read."""
        if kind not in self._kinds:
            reads = self

            def watch(held: Any, name: str) -> Any:
                value = kind.__getattribute__(held, name)  # type: ignore[call-arg]
                reads.see(held, name, value)
                return value

            def missing(held: Any, name: str) -> Any:
                value = kind.__getattr__(held, name)  # type: ignore[attr-defined]
                reads.see(held, name, value)
                return value

            body: dict[str, Any] = {"__getattribute__": watch, "__module__": kind.__module__}
            if hasattr(kind, "__getattr__"):
                body["__getattr__"] = missing
            self._kinds[kind] = type(kind.__name__, (kind,), body)
        return self._kinds[kind]

    def see(self, held: Any, name: str, value: object) -> None:
        """Record a value. Integers count only if they are attributes, because others cannot be set."""
        if not self.is_on or name.startswith("__") or (at := self._holder.get(id(held))) is None:
            return
        read = Read(at.module, f"{at.attribute}.{name}" if at.attribute else name)
        if type(value) is int and value > 1:
            self.integers[read] = value
        elif isinstance(value, Tensor) and isinstance(held, nn.Module):
            if name in held._parameters or name in held._buffers:
                self.tensors[read] = value
        elif not at.attribute and _is_record(value):
            self._holder[id(value)] = read

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch modules, and the objects that they hold."""
        kinds: list[tuple[Any, type]] = []
        for name, module in modules.items():
            self._holder[id(module)] = Read(name, "")
            held = [value for value in vars(module).values() if _is_record(value)]
            kinds += [(each, type(each)) for each in (module, *held)]
        try:
            for each, kind in kinds:
                if type(each) is kind and kind.__flags__ & _IS_OF_PYTHON and kind not in self._kinds.values():
                    _turn(each, self.spy(kind))
            yield
        finally:
            for each, kind in reversed(kinds):
                if type(each) is not kind:
                    _turn(each, kind)


def _turn(held: Any, kind: type) -> None:
    object.__setattr__(held, "__class__", kind)


def _is_record(value: object) -> bool:
    """Whether a value is a plain object with attributes, such as a config."""
    kind = type(value)
    plain = not isinstance(value, _PLAIN) and not callable(value) and hasattr(value, "__dict__")
    return plain and kind.__module__ != "builtins" and not issubclass(kind, (dict, list, tuple, set, str, int))


@contextmanager
def changed(module: nn.Module, integers: Mapping[Read, int], tensors: Mapping[Read, Tensor]) -> Iterator[None]:
    """Give attributes other values, and parameters and buffers other tensors, until the end of the context."""
    with ExitStack() as stack:
        for (name, attribute), value in integers.items():
            held = module.get_submodule(name)
            stack.callback(_restore, held, dict(vars(held)))
            set_value(held, attribute, value)
        for (name, attribute), tensor in tensors.items():
            stack.enter_context(_tensor(module.get_submodule(name), attribute, tensor))
        yield


def _restore(held: nn.Module, attributes: Mapping[str, object]) -> None:
    vars(held).clear()
    vars(held).update(attributes)


@contextmanager
def _tensor(module: nn.Module, name: str, tensor: Tensor) -> Iterator[None]:
    table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    kept = table[name]
    table[name] = nn.Parameter(tensor, kept.requires_grad) if isinstance(kept, nn.Parameter) else tensor
    try:
        yield
    finally:
        table[name] = kept
