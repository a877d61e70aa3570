"""Load from a checkpoint only the regions of the tensors that each rank needs.

PyTorch decides which regions of the stored parts a rank needs. The reader copies these regions in blocks of a few
megabytes, so a rank never holds more than its own part of the model, even if the checkpoint was written on fewer ranks.
"""

import dataclasses
import io
import json
import math
from collections.abc import Mapping
from typing import IO, Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from crosscut.checkpoint.format.index import INDEX_FILE, MOST_INDEX_BYTES, Index, IndexedTensor, TensorPart, parse_index
from crosscut.checkpoint.storage import Folder
from crosscut.config import CheckpointError

_BLOCK_BYTES = 1 << 22

StateDict: TypeAlias = dict[str, Any]
"""State of a run as nested dictionaries, lists, tensors and other values, as PyTorch returns it."""


def read_index(folder: Folder) -> Index:
    """Read the index of a checkpoint. Raises `CheckpointError` if the index is missing or invalid."""
    if INDEX_FILE not in folder.files():
        raise CheckpointError(f"`{folder}` must hold `{INDEX_FILE}`, but does not. Use another checkpoint.")
    return parse_index(folder.read(INDEX_FILE, most_bytes=MOST_INDEX_BYTES), f"{folder}/{INDEX_FILE}")


class CheckpointReader(dcp.StorageReader):
    """Reader of one checkpoint on a file system or an object store."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._index = Index({}, {})
        self._failed: Exception | None = None
        self._parts: dict[tuple[str, tuple[int, ...]], TensorPart] = {}

    def read_metadata(self, *_: object) -> Metadata:
        """Read the index. If this fails, `set_up_storage_reader` raises the error later, because PyTorch would log the
        traceback of an error that is raised here.
        """
        try:
            self._index = read_index(self.folder)
        except Exception as error:
            self._failed = error
        described = {name: _described(entry) for name, entry in self._index.tensors.items()}
        return Metadata({**described, **dict.fromkeys(self._index.values, BytesStorageMetadata())})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: object) -> None:  # noqa: ARG002
        """If reading the index failed, raise the stored error. PyTorch then raises the error on all ranks."""
        if self._failed is not None:
            raise self._failed
        tensors = self._index.tensors.items()
        self._parts = {(name, part.offsets): part for name, entry in tensors for part in entry.parts}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, one file at a time, in the order in which their parts are stored in the
        file.
        """
        by_file: dict[str, list[tuple[TensorPart, ReadItem]]] = {}
        for item in plan.items:
            name, offset = item.storage_index.fqn, item.storage_index.offset
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(json.dumps(self._index.values[name]).encode()))
            else:
                part = self._parts[name, tuple(offset or ())]
                by_file.setdefault(part.file, []).append((part, item))
        for name, items in by_file.items():
            with self.folder.open(name) as file:
                for part, item in sorted(items, key=lambda pair: pair[0].start):
                    target = planner.resolve_tensor(item).detach()
                    dtype = self._index.tensors[item.storage_index.fqn].dtype
                    copy_region(file, part, dtype, target, offsets=tuple(item.storage_offsets))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing, because a reader reads only one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Raise `NotImplementedError`. PyTorch calls this method only when the caller passes no reader."""
        raise NotImplementedError


def _described(entry: IndexedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in entry.parts]
    return TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks)


def copy_region(
    file: IO[bytes], part: TensorPart, dtype: torch.dtype, target: Tensor, *, offsets: tuple[int, ...]
) -> None:
    """Fill `target` from a part, reading one block of rows at a time. The region that is read starts at `offsets` in
    the part and has the shape of `target`.
    """
    shape, wanted, begin = part.sizes or (1,), tuple(target.shape) or (1,), offsets or (0,)
    target = target.view(wanted)
    row = math.prod(shape[1:])
    num_rows = max(1, _BLOCK_BYTES // max(1, row * dtype.itemsize))
    for first in range(0, wanted[0], num_rows):
        rows = min(num_rows, wanted[0] - first)
        file.seek(part.start + (begin[0] + first) * row * dtype.itemsize)
        block = _read_tensor(file, rows * row, dtype).view(rows, *shape[1:])
        for dim in range(1, len(shape)):
            block = block.narrow(dim, begin[dim], wanted[dim])
        target[first : first + rows].copy_(block)


def _read_tensor(file: IO[bytes], numel: int, dtype: torch.dtype) -> Tensor:
    if not numel:
        return torch.empty(0, dtype=dtype)
    content = bytearray(numel * dtype.itemsize)
    filled = 0
    while filled < len(content):
        piece = file.read(len(content) - filled)
        if not piece:
            raise EOFError("the file ends before the tensor is complete")
        content[filled : filled + len(piece)] = piece
        filled += len(piece)
    return torch.frombuffer(content, dtype=dtype)


class PaddingLoadPlanner(DefaultLoadPlanner):
    """Load planner for padded tensors. The checkpoint and the model may pad such a tensor to different numbers of rows.
    Rows that the checkpoint lacks keep their values.

    `padded` maps a parameter's name to the number of rows without padding. The number also applies to the optimizer
    state of the parameter.
    """

    def __init__(self, padded: Mapping[str, int]) -> None:
        super().__init__()
        self.padded = padded

    def set_up_planner(
        self, state_dict: StateDict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Replace a tensor's saved shape with the current shape if the shapes differ only in the padding."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        entries = {key: self._fit(key, entry) for key, entry in metadata.state_dict_metadata.items()}
        self.metadata = dataclasses.replace(metadata, state_dict_metadata=entries)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value that is not a tensor. PyTorch's own planner would read a pickle here."""
        loaded = json.loads(value.getvalue())
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], tuple):  # JSON has only lists
            loaded = tuple(loaded)
        *path, last = self.mappings[name]
        container: Any = self.original_state_dict
        for key in path:
            container = container[key]
        container[last] = loaded

    def _fit(self, key: str, saved: STORAGE_TYPES) -> STORAGE_TYPES:
        ours = self.state_dict.get(key)
        real = next((rows for name, rows in self.padded.items() if f".{name}" in key), None)
        if real is None or not isinstance(saved, TensorStorageMetadata) or not saved.size or ours is None:
            return saved
        if saved.size[1:] != ours.shape[1:] or min(saved.size[0], ours.shape[0]) < real:
            return saved  # a wrong shape, which PyTorch reports
        return dataclasses.replace(saved, size=ours.shape)
