"""Read parts of the tensors in the safetensors files of a folder.

A rank requests the rows and columns that it holds, and receives them in blocks. Blocks are read at their places in the
file, which the header gives once. A file that is mapped into memory would count as the rank's own memory, and the
library that maps it reads the header again whenever it opens the file: in a mixture, for each of thousands of tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from crosscut.config import CheckpointError, DamagedCheckpointError
from crosscut.config.published.weights import places_in, weight_files

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
    start: int = 0
    """Index of the tensor's first byte in the file."""
    pieces: tuple[tuple["StoredTensor", int, int], ...] = ()
    """Tensors of whose rows this one consists, each with its first row and the row after its last one. Empty for a
    tensor that is stored by itself."""

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def matrix(self, index: int) -> "StoredTensor":
        """Return one of the matrices that the tensor stacks."""
        return replace(self, shape=self.shape[1:], start=self.start + index * self.row_bytes)


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
    from safetensors import SafetensorError, safe_open  # imported only when such a file is read

    try:
        with safe_open(path, framework="pt"):  # checks the header, and that all bytes exist
            places = places_in(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None
    return {name: StoredTensor(path, name, place.shape, place.dtype, place.start) for name, place in places.items()}


def _damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"`{path}` must be an undamaged safetensors file, but is not: {error}. Download the file again."
    )


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
    """Read a whole tensor."""
    if tensor.pieces:
        return torch.cat([read_whole(piece)[first:last] for piece, first, last in tensor.pieces])
    return _rows(tensor, 0, tensor.shape[0])


def _rows(tensor: StoredTensor, first: int, last: int) -> Tensor:
    """Read the rows from `first` to `last`. Raises `DamagedCheckpointError` if the file has become shorter."""
    data = bytearray((last - first) * tensor.row_bytes)
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start + first * tensor.row_bytes)
            if file.readinto(data) < len(data):
                raise OSError("it ends too early")
    except OSError as error:
        raise _damaged(tensor.path, error) from None
    values = torch.frombuffer(data, dtype=DTYPES[tensor.dtype]) if data else torch.empty(0, dtype=DTYPES[tensor.dtype])
    return values.view(last - first, *tensor.shape[1:])


def blocks(tensor: StoredTensor, region: Region) -> Iterator[tuple[int, Tensor]]:
    """Yield a region of a tensor as blocks of rows. Each block is paired with the index of its first row, counted from
    the start of the region. Drop all references to a block before requesting the next block.
    """
    rows, *columns = region
    if tensor.pieces:
        yield from _blocks_of_pieces(tensor, region)
        return
    step = max(1, _BLOCK_BYTES // max(1, tensor.row_bytes))
    for first in range(rows.start, rows.stop, step):
        yield first - rows.start, _rows(tensor, first, min(first + step, rows.stop))[:, *columns]


def _blocks_of_pieces(tensor: StoredTensor, region: Region) -> Iterator[tuple[int, Tensor]]:
    rows, *columns = region
    start = 0  # first row of the piece in the whole tensor
    for piece, first, last in tensor.pieces:
        own = slice(max(rows.start - start, 0) + first, min(rows.stop - start + first, last))
        if own.start < own.stop:
            before = start + own.start - first - rows.start
            yield from ((before + place, block) for place, block in blocks(piece, (own, *columns)))
        start += last - first
