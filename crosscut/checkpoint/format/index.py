"""Index of a checkpoint: the file and position of every part of every tensor, and the values that are not tensors.

The index is JSON and ends with its own hash, because a repair must know that the index has not changed. Reading the
index yields only numbers and texts and runs no code, so an index from an unknown author is safe to read.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from crosscut.checkpoint.format.manifest import JsonValue, require_plain_name
from crosscut.checkpoint.format.tensor_file import DTYPES
from crosscut.checkpoint.storage import reason
from crosscut.config import CheckpointError
from crosscut.config.system.files import parse_json
from crosscut.config.system.records import Count, from_json

INDEX_FILE = "tensors.json"
MOST_INDEX_BYTES = 1 << 30
"""Maximum size of an index in bytes. A part takes about 120 bytes. If each of 2,048 ranks holds a part of each of 3,000
tensors, the index takes 700 MiB."""

DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
"""Element types that a checkpoint can hold, by their names in torch, such as `float32`."""


@dataclass(frozen=True)
class TensorPart:
    """A block of a tensor, stored in one piece in one file."""

    offsets: tuple[Count, ...]
    """Start of the block in the tensor, for each dimension."""
    sizes: tuple[Count, ...]
    """Shape of the block."""
    file: str
    start: Count
    """Position of the block's first byte in the file."""
    crc32: Count
    """CRC-32 of the block's bytes. It is checked only by a repair, after the manifest with the hashes of whole files is
    lost."""


@dataclass(frozen=True)
class IndexedTensor:
    """A tensor with its parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor as the index file describes it."""

    shape: tuple[Count, ...]
    dtype: str
    parts: tuple[TensorPart, ...]

    def checked(self, name: str) -> IndexedTensor:
        """Return the tensor. Raises `ValueError` if a part is not in a file of the checkpoint or not inside the shape,
        if the parts together do not have as many elements as the shape, or if the element type is unknown.
        """
        if self.dtype not in DTYPES_BY_NAME:
            raise ValueError(f"`{name}` has elements of an unknown type")
        for part in self.parts:
            require_plain_name(part.file)
            same_dims = len(part.offsets) == len(part.sizes) == len(self.shape)
            if not same_dims or any(o + s > n for o, s, n in zip(part.offsets, part.sizes, self.shape, strict=True)):
                raise ValueError(f"a part of `{name}` lies outside the tensor's shape")
        found, wanted = sum(math.prod(part.sizes) for part in self.parts), math.prod(self.shape)
        if found != wanted:
            raise ValueError(f"`{name}` must have {wanted:,} elements, but {found:,} are stored")
        return IndexedTensor(self.shape, DTYPES_BY_NAME[self.dtype], self.parts)


@dataclass(frozen=True)
class _StoredIndex:
    """Content of the index file."""

    tensors: dict[str, _StoredTensor]
    values: dict[str, JsonValue]


@dataclass(frozen=True)
class Index:
    """Tensors and values of a checkpoint, keyed by name."""

    tensors: dict[str, IndexedTensor]
    values: dict[str, JsonValue]

    def require_inside(self, sizes: Mapping[str, int]) -> None:
        """Raise `ValueError` if a part is not inside its file. `sizes` maps each file name to the file's size in
        bytes.
        """
        for name, entry in self.tensors.items():
            for part in entry.parts:
                num_bytes = math.prod(part.sizes) * entry.dtype.itemsize
                if part.start + num_bytes > sizes.get(part.file, 0):
                    raise ValueError(f"a part of `{name}` is not inside `{part.file}`")

    @property
    def files(self) -> set[str]:
        """Names of the files that hold tensors."""
        return {part.file for entry in self.tensors.values() for part in entry.parts}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dump_index(index: Index) -> bytes:
    """Return the content of the index file. Raises `CheckpointError` if the content is larger than `MOST_INDEX_BYTES`,
    because no reader would accept it.
    """
    tensors = {
        name: {
            "shape": entry.shape,
            "dtype": dtype_name(entry.dtype),
            "parts": [vars(part) for part in entry.parts],
        }
        for name, entry in index.tensors.items()
    }
    content = _sealed(json.dumps({"tensors": tensors, "values": index.values}, separators=(",", ":"))[:-1].encode())
    if len(content) > MOST_INDEX_BYTES:
        raise CheckpointError(
            f"`{INDEX_FILE}` must have at most {MOST_INDEX_BYTES >> 20:,} MiB, but has {len(content) >> 20:,} MiB. "
            "Shard the tensors over fewer ranks, for example with `layout.shard_group`."
        )
    return content


def _sealed(body: bytes) -> bytes:
    """Complete `body`, which is JSON without its closing brace: append the hash of `body`, and then the brace."""
    return body + _seal(body)


def _seal(body: bytes | memoryview) -> bytes:
    return f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


_SEAL_BYTES = len(_seal(b""))


def parse_index(content: bytes, path: str) -> Index:
    """Parse the content of the index file. Raises `CheckpointError`, with `path` in the message, if the content is not
    a valid index.
    """
    try:
        if not content.endswith(_seal(memoryview(content)[:-_SEAL_BYTES])):
            raise ValueError("its content does not match the SHA-256 at its end")
        stored = from_json(_StoredIndex, parse_json(content))
        return Index({name: tensor.checked(name) for name, tensor in stored.tensors.items()}, stored.values)
    except ValueError as error:
        raise CheckpointError(
            f"`{path}` must be an index of tensors, but is not: {reason(error)}. Use another checkpoint."
        ) from None
