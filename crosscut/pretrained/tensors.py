"""Read parts of the tensors in the safetensors files of a folder.

A rank requests the rows and columns that it holds, and receives them in blocks. A file that is mapped into memory
counts as the rank's own memory, and the operating system maps more pages than the rank reads. The file is therefore
opened for each block and closed after the block, so that a rank maps at most one block of whole rows at a time.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
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
    pieces: tuple[tuple["StoredTensor", int, int], ...] = ()
    """Tensors of whose rows this one consists, each with its first row and the row after its last one. Empty for a
    tensor that is stored by itself."""
    index: int | None = None
    """Index of the first dimension of the stored tensor at which this one is; None for the whole tensor."""

    def matrix(self, index: int) -> "StoredTensor":
        """Return one of the matrices that the tensor stacks."""
        return replace(self, shape=self.shape[1:], index=index)


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


def cut_again(tensors: Sequence[StoredTensor], sizes: Sequence[int]) -> list[StoredTensor]:
    """Return tensors of `sizes` rows each, which together have the rows of `tensors`, in their order. Raises
    `CheckpointError` if the numbers of rows differ.
    """
    ends = list(accumulate(tensor.shape[0] for tensor in tensors))
    if ends[-1] != sum(sizes):
        names = " and ".join(f"`{tensor.name}`" for tensor in tensors)
        raise CheckpointError(
            f"{names} in `{tensors[0].path}` must have {sum(sizes)} rows (`config.json`), but have {ends[-1]}. "
            "Download the model again."
        )
    found = []
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        pieces = [
            (tensor, max(end - size - last + tensor.shape[0], 0), min(end - last, 0) + tensor.shape[0])
            for tensor, last in zip(tensors, ends, strict=True)
        ]
        held = tuple(piece for piece in pieces if piece[1] < piece[2])
        found.append(replace(tensors[0], shape=(size, *tensors[0].shape[1:]), pieces=held))
    return found


def read_whole(tensor: StoredTensor) -> Tensor:
    """Read a whole tensor. Use this only for small tensors, such as the matrices of an adapter."""
    if tensor.pieces:
        return torch.cat([read_whole(piece)[first:last] for piece, first, last in tensor.pieces])
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
    if tensor.pieces:
        yield from _blocks_of_pieces(tensor, region)
        return
    row_bytes = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for first in range(rows.start, rows.stop, step):
        with _opened(tensor.path) as file:
            place = () if tensor.index is None else (tensor.index,)
            part = file.get_slice(tensor.name)[*place, slice(first, min(first + step, rows.stop)), *columns]
            yield first - rows.start, part


def _blocks_of_pieces(tensor: StoredTensor, region: Region) -> Iterator[tuple[int, Tensor]]:
    rows, *columns = region
    start = 0  # first row of the piece in the whole tensor
    for piece, first, last in tensor.pieces:
        own = slice(max(rows.start - start, 0) + first, min(rows.stop - start + first, last))
        if own.start < own.stop:
            before = start + own.start - first - rows.start
            yield from ((before + place, block) for place, block in blocks(piece, (own, *columns)))
        start += last - first
