"""Account of the memory during a step. It shows which code holds the memory at the peak.

An account lists the memory held before the step, then every allocation and release in order. On the CPU, a dispatch
mode sees each tensor's storage come and go. On CUDA, the account comes from the caching allocator's own history, which
also covers compiled code and memory that is not a tensor. Each allocation is attributed to the lines of this package
that requested it: the innermost line, and the innermost line in another file. The innermost class around these lines
names the module, or the autograd function in a backward pass, such as
`MLP (parallel/linear.py:38 < model/sublayers/mlp.py:27)`. This text is called the holder.
"""

import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.training.watching.storages import (
    OperatorCall,
    OperatorMode,
    frames,
    peak_of,
    resizing_told_to,
    storages_of,
)

PACKAGE = Path(__file__).resolve().parents[2]
_ELSEWHERE = "outside of crosscut"
_NO_HOLDERS = {
    *(str(Path(__file__).with_name(f"{name}.py")) for name in ("memory_account", "profiling", "storages")),
    str(PACKAGE / "kernels" / "functions.py"),
}
"""Files that are never named as holders, because they only measure, or only call functions of other files."""


@dataclass
class Account:
    """Allocations and releases of memory, with the holder of each."""

    before: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Memory held before the step: bytes and holder by block key."""
    events: list[tuple[int, int, str]] = field(default_factory=list)
    """Allocations and releases in order, as (key, bytes, holder). A release has 0 bytes."""
    names: dict[int, str] = field(default_factory=dict)
    """Names that replace holders, by block key. A name applies to the last block that had this key."""

    def call(self, tensors: Iterable[Tensor], holder: str) -> None:
        """Attribute the memory of `tensors` to `holder`, starting with the allocation of this memory. Call this while
        the tensors exist, because a later tensor may reuse the key of a freed tensor.
        """
        self.names.update({_key(tensor): holder for tensor in _plain(tensors)})

    def peak(self) -> tuple[int, dict[str, int]]:
        """Return the peak number of bytes, and the bytes of each holder at the peak, largest first."""
        most, live = peak_of(self._by_name())
        held: dict[str, int] = defaultdict(int)
        for size, holder in live:
            held[holder] += size
        return most, dict(sorted(((holder, size) for holder, size in held.items() if size), key=lambda item: -item[1]))

    def _by_name(self) -> list[tuple[int, int, str]]:
        """Return the memory held before the step, and the events. Holders are replaced by the names in `names`."""
        names = dict(self.names)
        events = [(key, size, names.pop(key, holder) if size else holder) for key, size, holder in self.events[::-1]]
        before = [(key, size, names.get(key, holder)) for key, (size, holder) in self.before.items()]
        return [*before, *events[::-1]]


def holder_of(frames: Iterable[tuple[str, int]]) -> str:
    """Return the holder for a stack of (file, line), innermost first. The holder names the innermost module, and up to
    two lines of this package from different files.
    """
    lines: list[tuple[str, int]] = []
    module = ""
    for file, line in frames:
        if not file.startswith(f"{PACKAGE}/") or file in _NO_HOLDERS:
            continue
        module = module or _module_at(file, line)
        if len(lines) < 2 and file not in (known for known, _ in lines):
            lines.append((file, line))
        if module and len(lines) == 2:
            break
    places = " < ".join(f"{Path(file).relative_to(PACKAGE).as_posix()}:{line}" for file, line in lines)
    return f"{module} ({places})" if module else places or _ELSEWHERE


def _module_at(file: str, line: int) -> str:
    """Name of the module or autograd function whose code contains a line. Empty if the line is in other code."""
    return next((name for first, last, name in _modules_in(file) if first <= line <= last), "")


@lru_cache
def _modules_in(file: str) -> list[tuple[int, int, str]]:
    """First line, last line and name of each module and autograd function in a file of this package."""
    found = sys.modules.get(".".join([PACKAGE.name, *Path(file).relative_to(PACKAGE).with_suffix("").parts]))
    classes = [
        kind
        for kind in (vars(found).values() if found else ())
        if isinstance(kind, type) and issubclass(kind, nn.Module | torch.autograd.Function)
    ]
    own = [kind for kind in classes if kind.__module__ == getattr(found, "__name__", "")]
    sources = [(kind.__name__, *inspect.getsourcelines(kind)) for kind in own]
    return [(first, first + len(source) - 1, name.lstrip("_")) for name, source, first in sources]


@contextmanager
def account_of(named: Mapping[str, Iterable[Tensor]], device: torch.device) -> Iterator[Account]:
    """Record the memory that the code inside the context allocates. `named` maps the name of a holder to tensors that
    exist before this code runs.

    On the CPU, the code inside must not be compiled, because a dispatch mode does not see the memory of compiled code.
    """
    account = Account()
    names = {_key(tensor): name for name, tensors in named.items() for tensor in _plain(tensors)}
    if device.type == "cuda":
        with _history(device, names, account):
            yield account
        return
    for name, tensors in named.items():
        account.before.update({_key(t): (t.untyped_storage().nbytes(), name) for t in _plain(tensors)})
    mode = _StorageMode(account)
    with mode, resizing_told_to(mode.record):
        yield account


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the local tensors that own memory."""
    for tensor in tensors:
        local: Tensor = getattr(tensor, "_local_tensor", tensor)
        if local.untyped_storage().nbytes():
            yield local


def _key(tensor: Tensor) -> int:
    """Return the key of a local tensor's memory block: its address on CUDA, its storage's identity on the CPU."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.device.type == "cuda" else storage._cdata


class _StorageMode(OperatorMode):
    """Dispatch mode that records every new storage and its release."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self.account = account
        self.known = set(account.before)

    def note(self, call: OperatorCall) -> None:
        """Record the new storages of an operator's results."""
        for tensor, storage in storages_of(call.result):
            if type(tensor).__name__ != "FakeTensor" and storage._cdata not in self.known:
                self.record(storage)

    def record(self, storage: torch.UntypedStorage) -> None:
        """Record a storage that is new or has been resized."""
        key, lines = storage._cdata, ((frame.f_code.co_filename, frame.f_lineno) for frame in frames())
        self.account.events.append((key, storage.nbytes(), holder_of(lines)))
        if key not in self.known:
            self.known.add(key)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.known.discard(key)
        self.account.events.append((key, 0, ""))


@contextmanager
def _history(device: torch.device, names: Mapping[int, str], account: Account) -> Iterator[None]:
    """Record the caching allocator's history of the code inside the context, and add the history to the account at the
    end.
    """
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000, device=device)
    try:
        yield
        torch.cuda.synchronize(device)
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    read_snapshot(snapshot, index, names, account)


def read_snapshot(snapshot: Mapping[str, Any], device: int, names: Mapping[int, str], account: Account) -> None:
    """Add the allocator's history, and the allocator's state at the end, to `account`.

    `names` maps the address of a memory block to its holder. A block that is older than the history and has no name
    gets the holder "held before the step".
    """
    taken: set[int] = set()
    given_back: dict[int, int] = {}
    for entry in snapshot["device_traces"][device]:
        address, size = entry.get("addr", 0), entry.get("size", 0)
        if entry["action"] == "alloc":
            frames = ((frame["filename"], frame["line"]) for frame in entry.get("frames", ()))
            account.events.append((address, size, holder_of(frames)))
            taken.add(address)
        elif entry["action"] == "free_completed":
            if address not in taken:
                given_back[address] = size
            taken.discard(address)
            account.events.append((address, 0, ""))
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in taken:
                given_back.setdefault(block["address"], block["size"])
    for address, size in given_back.items():
        account.before[address] = (size, names.get(address, "held before the step"))
