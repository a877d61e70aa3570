"""Reader that loads only the regions of the tensors that a layout needs.

A checkpoint stores each tensor in shards. PyTorch's own reader loads each shard as a whole before it copies the
required region. With PyTorch's reader, a rank would therefore hold shards far larger than its own part of the tensor if
fewer ranks wrote the checkpoint than now read it. This reader locates the bytes of a shard in its file (`torch.save`
stores them uncompressed in a zip archive) and copies the required rows in blocks of a few megabytes.
"""

import dataclasses
import io
import math
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from crosscut.checkpoint.storage import Folder
from crosscut.checkpoint.writer import HashingStreams

_BLOCK_BYTES = 1 << 22
_LOCAL_HEADER = 30
"""Number of bytes in a zip entry's header before the name. The last four bytes are the lengths of the name and of the
extra field."""


class CheckpointReader(dcp.FileSystemReader):
    """Reader of one checkpoint from any storage."""

    def __init__(self, folder: Folder) -> None:
        super().__init__("unused")
        self.folder = folder
        self.fs, self.path = HashingStreams(folder), str(folder)  # type: ignore[assignment] # see the writer
        self._dtypes: dict[str, torch.dtype] = {}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember the element type of each tensor and the shape of each shard, because the load plan contains
        neither.
        """
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        entries = metadata.state_dict_metadata.items()
        self._dtypes = {n: e.properties.dtype for n, e in entries if isinstance(e, TensorStorageMetadata)}
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk.sizes
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the load plan, one file after the other. Each file is read from start to end."""
        by_file: dict[str, list[tuple[ReadItem, Any]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            by_file.setdefault(place.relative_path, []).append((item, place))
        for name, items in by_file.items():
            with self.folder.open(name) as file:
                for item, place in sorted(items, key=lambda pair: pair[1].offset):
                    self._read_item(file, item, place, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, file: IO[bytes], item: ReadItem, place: Any, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            file.seek(place.offset)
            planner.load_bytes(item, io.BytesIO(file.read(place.length)))
            return
        target = planner.resolve_tensor(item).detach()
        index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
        saved = saved_part(file, place, shape=tuple(self._chunks[index]), dtype=self._dtypes[index.fqn])
        saved.copy_to(target, file, offsets=tuple(item.storage_offsets))
        planner.commit_tensor(item, target)


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """A shard of a tensor in a file. `start` is the position of the shard's first byte in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    def copy_to(self, target: Tensor, file: IO[bytes], *, offsets: tuple[int, ...]) -> None:
        """Fill `target` with a region of the shard, one block of rows at a time. The region starts at the indices
        `offsets` and has the shape of `target`.
        """
        shape, wanted = self.shape or (1,), tuple(target.shape) or (1,)
        begin = offsets or (0,)
        target = target.view(wanted) if target.dim() == 0 else target
        row = math.prod(shape[1:])
        num_rows = max(1, _BLOCK_BYTES // max(1, row * self.dtype.itemsize))
        for first in range(0, wanted[0], num_rows):
            rows = min(num_rows, wanted[0] - first)
            file.seek(self.start + (begin[0] + first) * row * self.dtype.itemsize)
            block = _read_tensor(file, rows * row, self.dtype).view(rows, *shape[1:])
            for dim in range(1, len(shape)):
                block = block.narrow(dim, begin[dim], wanted[dim])
            target[first : first + rows].copy_(block)


def saved_part(file: IO[bytes], place: Any, *, shape: tuple[int, ...], dtype: torch.dtype) -> SavedPart:
    """Locate a shard in a file. `place` is the entry of PyTorch's metadata with the `offset` and `length` of the shard
    in bytes.
    """
    return SavedPart(shape, dtype, _start_of_data(file, place.offset, place.length))


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


def _start_of_data(file: IO[bytes], offset: int, length: int) -> int:
    """Position of the tensor's bytes in a file, for a tensor that `torch.save` wrote at `offset`."""
    with zipfile.ZipFile(FileSlice(file, offset, length)) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("/data/0"))
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("the tensor is compressed, but `torch.save` never compresses a tensor")
    file.seek(offset + entry.header_offset + _LOCAL_HEADER - 4)
    lengths = file.read(4)
    extra = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return offset + entry.header_offset + _LOCAL_HEADER + extra


class FileSlice(io.RawIOBase):
    """A section of a file that can be read like a file of its own."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self.file, self.offset, self.length, self.position = file, offset, length, 0

    def readable(self) -> bool:
        """Whether the section can be read: always true."""
        return True

    def seekable(self) -> bool:
        """Whether the position can be changed: always true."""
        return True

    def tell(self) -> int:
        """Position relative to the start of the section."""
        return self.position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position in the section, and return the new position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        self.position = base + position
        return self.position

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes. If `size` is negative, read to the end of the section."""
        left = max(0, self.length - self.position)
        self.file.seek(self.offset + self.position)
        content = self.file.read(left if size < 0 else min(size, left))
        self.position += len(content)
        return content


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
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Replace a tensor's saved shape by the current shape if the shapes differ only in the padding."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        entries = {key: self._fit(key, entry) for key, entry in metadata.state_dict_metadata.items()}
        self.metadata = dataclasses.replace(metadata, state_dict_metadata=entries)

    def _fit(self, key: str, saved: Any) -> Any:
        ours = self.state_dict.get(key)
        real = next((rows for name, rows in self.padded.items() if f".{name}" in key), None)
        if real is None or not isinstance(saved, TensorStorageMetadata) or not saved.size or ours is None:
            return saved
        if saved.size[1:] != ours.shape[1:] or min(saved.size[0], ours.shape[0]) < real:
            return saved  # a real mismatch, which PyTorch reports
        return dataclasses.replace(saved, size=ours.shape)
