"""Read parts of the tensors in the safetensors files of a folder.

A rank requests the rows and columns that it holds, and receives them in blocks. A file that is mapped into memory
counts as the rank's own memory, and the operating system maps more pages than the rank reads. The file is therefore
opened for each block and closed after the block, so that a rank maps at most one block of whole rows at a time.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.config import CheckpointError, DamagedCheckpointError
from crosscut.config.published.weights import weight_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Element types that weights may have: torch's types, keyed by safetensors' names."""

_BLOCK_BYTES = 1 << 22

Region = tuple[slice, ...]
"""A region of a tensor: a slice of rows, or a slice of rows and a slice of columns. Each slice has a start and a
stop."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Element type under safetensors' name, such as "BF16"."""


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List all tensors of a folder, keyed by name, from the files' headers.

    Raises `CheckpointError` if there are no files, if a file is missing or damaged, or if the index names a file that
    does not exist.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        if not path.is_file():
            raise CheckpointError(
                f"`{folder}` must hold `{path.name}`, but does not. Download the model again, or save it as "
                "safetensors with `save_pretrained`."
            )
        tensors |= list_file(path)
    return tensors


def list_file(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one file, keyed by name, from the file's header. Raises `CheckpointError` for a damaged
    file.
    """
    tensors = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - the file is not a mapping
            part = file.get_slice(name)
            tensors[name] = StoredTensor(path, name, tuple(part.get_shape()), str(part.get_dtype()))
    return tensors


def read_whole(tensor: StoredTensor) -> Tensor:
    """Read a whole tensor. Use this only for small tensors, such as the matrices of an adapter."""
    with _opened(tensor.path) as file:
        whole: Tensor = file.get_tensor(tensor.name)
    return whole


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open  # imported only when such a file is read

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpointError(
            f"`{path}` must be an undamaged safetensors file, but is not: {error}. Download the file again."
        ) from None


def blocks(tensor: StoredTensor, region: Region) -> Iterator[tuple[int, Tensor]]:
    """Yield a region of a tensor as blocks of rows. Each block is paired with the index of its first row, counted from
    the start of the region.

    A block is mapped from the file. Copy the block, and drop all references to it before requesting the next block.
    """
    rows, *columns = region
    row_bytes = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for first in range(rows.start, rows.stop, step):
        with _opened(tensor.path) as file:
            yield first - rows.start, file.get_slice(tensor.name)[slice(first, min(first + step, rows.stop)), *columns]
