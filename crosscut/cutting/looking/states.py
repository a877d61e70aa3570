"""State of a module, and of the random generators: kept, and brought back.

Two rules have their home here. Looking at a module changes nothing: a forward pass may change counters, caches,
statistics of batch norm and random states. And an error changes nothing: a module is cut, or it is as it was.
"""

import copy
import enum
import gc
import random
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_Undo = Callable[[], object]

_SHARED = (type, types.ModuleType, types.FunctionType, enum.Enum)
"""Kinds of objects that are no part of a module's state, because others share them."""
_VALUES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Kinds of objects that never change."""


class State:
    """Present state of the random generators and, unless it is None, of a module: classes, attributes, the contents of
    objects and containers that attributes hold, hooks, tensors, and their `.data`, `.grad` and `requires_grad`.

    Values of parameters, and of arrays in files, are not copied, because they are large: code that writes into them
    does change them.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._undo = _undo_of_random_states()
        with _without_collections():
            self._note(module)

    def _note(self, module: nn.Module | None) -> None:
        """Note the undo of all changes of a module and of what it holds."""
        seen, todo = set[int](), list[Any]([module])
        while todo:
            held = todo.pop()
            kind: Any = type(held)
            if kind in _VALUES or id(held) in seen or isinstance(held, _SHARED):
                continue
            seen.add(id(held))
            if issubclass(kind, MutableMapping):
                keys, values = tuple(held), tuple(held.values())
                self._undo.append(partial(_refill_mapping, held, keys, values))
                todo += values
            elif issubclass(kind, MutableSequence | MutableSet | tuple):
                items = tuple(held)
                self._undo.append(partial(_refill, held, items))
                todo += items
            elif issubclass(kind, Tensor) and held.layout is torch.strided and not held.is_inference():
                self._undo.append(_undo_of_tensor(held))
            else:
                if undo := _undo_of_values(held):
                    self._undo.append(undo)
                for slot in _slots_of(kind):
                    value = _value_in(slot, held)
                    self._undo.append(partial(_fill_slot, slot, held, value))
                    todo.append(value)
                if hasattr(held, "__dict__"):
                    self._undo.append(partial(_give_class, held, kind))
                    todo.append(vars(held))

    def restore(self) -> None:
        """Bring the state back."""
        for undo in self._undo:
            undo()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Context without the garbage collector, which would search a growing list of objects that are all in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def unchanged(module: nn.Module, *, by_errors: bool = False) -> Iterator[None]:
    """Context after which a module and the random generators have the `State` that they had before. With `by_errors`,
    only if the context ends with an error.
    """
    state = State(module)
    try:
        yield
    except BaseException:
        state.restore()
        raise
    if not by_errors:
        state.restore()


@contextmanager
def unchanged_random_states() -> Iterator[None]:
    """Context after which the random generators have the states that they had before."""
    state = State(None)
    try:
        yield
    finally:
        state.restore()


def copied(inputs: Mapping[str, object]) -> dict[str, object]:
    """Return copies of a module's keyword inputs, into which the module may write."""
    tensors = [each for each in tree_leaves(dict(inputs)) if isinstance(each, Tensor)]
    copies: dict[int, object] = {id(each): each.detach().clone().requires_grad_(each.requires_grad) for each in tensors}
    return copy.deepcopy(dict(inputs), copies)


def results_of(output: object) -> list[Tensor]:
    """Return the tensors of floating point that a module has returned, also as attributes of an object."""
    leaves = [output, *vars(output).values()] if hasattr(output, "__dict__") else [output]
    return [each for each in tree_leaves(leaves) if isinstance(each, Tensor) and each.is_floating_point()]


def _undo_of_random_states() -> list[_Undo]:
    found: list[_Undo] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
    ]
    if torch.cuda.is_initialized():
        found.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return found


def _undo_of_tensor(tensor: Tensor) -> _Undo:
    data, needs_grad = tensor.data, tensor.requires_grad
    value = None if isinstance(tensor, nn.Parameter) else data.clone()
    grad = tensor.grad if tensor.is_leaf else None

    def undo() -> None:
        if (tensor.dtype, tensor.shape, tensor.data_ptr()) != (data.dtype, data.shape, data.data_ptr()):
            tensor.data = data
        if value is not None:
            data.copy_(value)  # always, because statistics of batch norm change without a new version
        if tensor.is_leaf:
            tensor.requires_grad_(needs_grad)
            tensor.grad = grad

    return undo


def _undo_of_values(held: Any) -> _Undo | None:
    """Undo of changes of a generator of random numbers, or of an array of NumPy. None for other objects."""
    if isinstance(held, torch.Generator):
        return partial(held.set_state, held.get_state())
    if isinstance(held, np.random.RandomState):
        return partial(held.set_state, held.get_state(legacy=False))
    if isinstance(held, random.Random) and not isinstance(held, random.SystemRandom):
        return partial(held.setstate, held.getstate())
    if isinstance(held, np.random.Generator):
        return partial(setattr, held.bit_generator, "state", held.bit_generator.state)
    if isinstance(held, np.ndarray) and held.flags.writeable and not isinstance(held, np.memmap):
        return partial(_refill_array, held, held.copy())
    return None


def _refill_array(held: np.ndarray, values: np.ndarray) -> None:
    """Give an array its shape and its values again."""
    held.flags.writeable = True
    if held.size != values.size:
        held.resize(values.shape, refcheck=False)
    held.shape = values.shape
    np.copyto(held, values)


_EMPTY = object()
"""Value of a slot that has none."""


@lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Slots of the objects of a class, if it has `__slots__`."""
    members = (each for base in kind.__mro__ if "__slots__" in vars(base) for each in vars(base).values())
    return tuple(each for each in members if isinstance(each, types.MemberDescriptorType))


def _value_in(slot: types.MemberDescriptorType, held: object) -> object:
    try:
        return slot.__get__(held)
    except AttributeError:
        return _EMPTY


def _fill_slot(slot: types.MemberDescriptorType, held: object, value: object) -> None:
    """Give a slot its value again, if it has another one."""
    if _value_in(slot, held) is value:
        return
    if value is _EMPTY:
        slot.__delete__(held)
    else:
        slot.__set__(held, value)


def _refill_mapping(held: Any, keys: tuple[object, ...], values: tuple[object, ...]) -> None:
    """Give a mapping its items again, if it has others."""
    if len(held) != len(keys) or not all(map(is_, held, keys)) or not all(map(is_, held.values(), values)):
        held.clear()
        held.update(zip(keys, values, strict=True))


def _refill(held: Any, items: tuple[object, ...]) -> None:
    """Give a sequence or a set its items again, if it has others."""
    if len(held) == len(items) and all(map(is_, held, items)):
        return
    held.clear()
    if isinstance(held, MutableSequence):
        held.extend(items)
    else:
        held |= {*items}


def _give_class(held: object, kind: type) -> None:
    if type(held) is not kind:
        object.__setattr__(held, "__class__", kind)
