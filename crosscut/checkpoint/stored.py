"""Read a checkpoint's tensors one at a time, on one process and without the model that the checkpoint belongs to."""

import math
import zlib
from collections.abc import Iterator
from typing import IO

import torch
from torch import Tensor

from crosscut.checkpoint.format.index import IndexedTensor, TensorPart
from crosscut.checkpoint.reader import copy_region, read_index
from crosscut.checkpoint.storage import Folder, reason, storage_errors_told
from crosscut.config import CheckpointError

_BLOCK_BYTES = 1 << 20
_COMPLETE = "a complete checkpoint"


class StoredTensors:
    """Tensors and values of a checkpoint, by flat name."""

    def __init__(self, folder: Folder) -> None:
        """Read the index. Raises `CheckpointError` if the index cannot be read."""
        self.folder = folder
        with storage_errors_told(self.folder, _COMPLETE):
            self.index = read_index(folder)
            self.index.require_inside(folder.files())  # so that no tensor is larger than the files
        self.tensors, self.values = self.index.tensors, self.index.values

    def entry(self, name: str) -> IndexedTensor:
        """Return the shape, type and parts of a tensor. Raises `CheckpointError` if the checkpoint does not hold the
        tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"`{self.folder}` must hold the tensor `{name}`, but does not.")
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """Assemble a tensor from its parts. Raises `CheckpointError` if the tensor is missing or cannot be read."""
        entry = self.entry(name)
        with storage_errors_told(self.folder, _COMPLETE):
            whole = torch.empty(entry.shape, dtype=entry.dtype)
            for part in entry.parts:
                target = whole
                for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                    target = target.narrow(dim, offset, size)
                with self.folder.open(part.file) as file:
                    copy_region(file, part, entry.dtype, target, offsets=(0,) * whole.dim())
        return whole

    def check(self) -> Iterator[str]:
        """Read all parts and yield a message for each damaged part.

        The index holds a CRC-32 of each part, so a changed bit is found even without the hashes of a manifest.
        """
        for name, entry in self.tensors.items():
            for part in entry.parts:
                try:
                    with self.folder.open(part.file) as file:
                        damaged = _is_damaged(file, part, math.prod(part.sizes) * entry.dtype.itemsize)
                except Exception as error:  # object stores have exception classes of their own
                    yield f"`{name}` in `{part.file}` cannot be read: {reason(error)}"
                    continue
                if damaged:
                    yield f"`{name}` in `{part.file}` fails its checksum"


def _is_damaged(file: IO[bytes], part: TensorPart, num_bytes: int) -> bool:
    """Whether a part's bytes do not match its checksum, or the file ends before the end of the part."""
    file.seek(part.start)
    crc32 = 0
    while num_bytes and (block := file.read(min(_BLOCK_BYTES, num_bytes))):
        crc32 = zlib.crc32(block, crc32)
        num_bytes -= len(block)
    return bool(num_bytes) or crc32 != part.crc32
