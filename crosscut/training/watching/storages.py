"""Parts that the account of a step's memory and the ledger of a dry run share: they see the storages of tensors come,
change their size and go, and find the peak.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosscut.parallel.recorder import comes_again

_T = TypeVar("_T")


class OperatorCall(NamedTuple):
    """Call of an operator, with its result."""

    operator: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    result: object


class OperatorMode(TorchDispatchMode, ABC):
    """Dispatch mode that looks at every operator on plain tensors, after the operator has run."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator, and note it with its result."""
        if comes_again(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.note(OperatorCall(func, args, kwargs or {}, result))
        return result

    @abstractmethod
    def note(self, call: OperatorCall) -> None:
        """Look at the call of an operator."""


def storages_of(result: object) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """Yield the local tensors in an operator's result that have memory, each with its storage."""
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor) and type(tensor).__name__ != "DTensor":
            storage = tensor.untyped_storage()
            if storage.nbytes():
                yield tensor, storage


def peak_of(events: Sequence[tuple[int, int, _T | None]]) -> tuple[int, list[tuple[int, _T]]]:
    """Return the peak of the held bytes, and the bytes and the holder of each block at the peak, in order.

    An event is (key of the block, bytes, holder). The block is new, or has a new size or holder. Without a holder, the
    block is released.
    """
    held: dict[int, int] = {}
    total = most = until = 0
    for index, (key, size, _) in enumerate(events, 1):
        total += size - held.pop(key, 0)
        held[key] = size
        if total > most:
            most, until = total, index
    live: dict[int, tuple[int, _T]] = {}
    for key, size, holder in events[:until]:
        live.pop(key, None)
        if holder:
            live[key] = (size, holder)
    return most, list(live.values())


def frames() -> Iterator[FrameType]:
    """Yield the frames of the stack, innermost first, starting with the caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def replaced(module: ModuleType, **values: object) -> Iterator[None]:
    """Context in which names of a module have other values."""
    names = vars(module)
    before = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(before)


@contextmanager
def resizing_told_to(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """While the context is active, call `tell` with every storage that Python resizes.

    Sharding resizes the storage of gathered parameters without calling an operator, so a dispatch mode does not see the
    change.
    """
    storages: Any = torch.UntypedStorage
    plain = storages.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> object:
        result = plain(storage, size)
        tell(storage)
        return result

    storages.resize_ = resize_
    try:
        yield
    finally:
        storages.resize_ = plain


class LiveStorages(OperatorMode):
    """Dispatch mode that counts the bytes of all tensors that operators make while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, call: OperatorCall) -> None:
        """Note the storages of the results that no argument has."""
        given = {storage._cdata for _, storage in storages_of((call.args, call.kwargs))}
        for _, storage in storages_of(call.result):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def nbytes(self) -> int:
        """Return the bytes of the tensors that are still alive."""
        return sum(size for storage, size in self._made.values() if not storage.expired())
