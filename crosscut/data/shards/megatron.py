"""Token files of Megatron-LM: a `.bin` of concatenated ids, and an `.idx` with the starts of sequences and documents.

The `.idx` is little-endian and contains, in this order:

- the bytes `MMIDIDX` and two zero bytes,
- the version, 1 (uint64),
- the code of the ids' type (uint8),
- the number of sequences S (uint64),
- D + 1, where D is the number of documents (uint64),
- the number of ids in each sequence (int32, [S]),
- the byte position of each sequence in the `.bin` (int64, [S]),
- the index of the first sequence of each document, followed by S (int64, [D + 1]).

Multimodal models append one byte per sequence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError
from crosscut.data.shards.array_file import ArrayFile
from crosscut.data.text.sources import unreadable

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Element types by their codes in the format."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_AT_ONCE = 1 << 20
"""Number of sequences that are checked or written at a time, which limits memory."""

Numbers = npt.NDArray[np.signedinteger]
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """Documents of Megatron-LM's token files as token ids, which are read on demand."""

    path: Path
    """Path of the `.idx`."""

    tokens: ArrayFile
    """Ids of all documents, concatenated."""

    starts: npt.NDArray[np.int64]
    """Start of each document in `tokens`, followed by the end of the last document, [documents + 1]."""

    @classmethod
    def open(cls, prefix: Path) -> IndexedTokens:
        """Open a pair of files. `prefix` is the path of both files without a suffix, or the path of one of the two
        files.

        Raises `DataError` for a file that cannot be read, has another format or is truncated, and for an index that
        contradicts itself or the `.bin`.
        """
        name = str(prefix)
        name = name.removesuffix(".idx") if name.endswith(".idx") else name.removesuffix(".bin")
        index, data = Path(f"{name}.idx"), Path(f"{name}.bin")
        try:
            dtype, sizes, pointers, documents = _read_index(index)
            _check_pointers(index, sizes, pointers, dtype.itemsize)
            _check_documents(index, documents, len(sizes))
            num_tokens = (int(pointers[-1]) // dtype.itemsize + int(sizes[-1])) if len(sizes) else 0
            if data.stat().st_size != num_tokens * dtype.itemsize:
                raise DataError(
                    f"`{data}` must hold the {num_tokens:,} ids of {dtype.itemsize} bytes that `{index.name}` counts, "
                    f"but is {data.stat().st_size:,} bytes long. Create both files again."
                )
            tokens = ArrayFile(data, dtype, num_tokens)
        except OSError as error:
            raise unreadable(str(error.filename), error) from None
        starts = np.append(pointers // dtype.itemsize, num_tokens)
        return cls(index, tokens, starts[documents])

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def document(self, number: int) -> Ids:
        """Return the ids of one document, which may consist of several sequences."""
        ids: Ids = self.tokens[int(self.starts[number]) : int(self.starts[number + 1])]
        return ids


def write_index(path: Path, sizes: npt.NDArray[np.integer], dtype: npt.DTypeLike) -> None:
    """Write an `.idx`. `sizes` holds the number of ids of each document. Each document is one sequence.

    Raises `DataError` if the format has no code for `dtype`.
    """
    kind = _stored(dtype)
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == kind)
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(sizes), len(sizes) + 1))
        for start in range(0, len(sizes), _AT_ONCE):
            file.write(sizes[start : start + _AT_ONCE].astype("<i4").data)
        offset = 0
        for start in range(0, len(sizes), _AT_ONCE):
            ends = offset + np.cumsum(sizes[start : start + _AT_ONCE], dtype="<i8") * kind.itemsize
            file.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").data)
            offset = int(ends[-1])
        for start in range(0, len(sizes) + 1, _AT_ONCE):
            file.write(np.arange(start, min(start + _AT_ONCE, len(sizes) + 1), dtype="<i8").data)


def _stored(dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    kind = np.dtype(dtype).newbyteorder("<")
    if all(np.dtype(known) != kind for known in DTYPES.values()):
        names = ", ".join(np.dtype(known).name for known in DTYPES.values())
        raise DataError(
            f"The ids of a Megatron `.bin` must have one of the types {names}, but have the type {kind.name}. "
            "Use a wider type."
        )
    return kind


def _read_index(path: Path) -> tuple[np.dtype[np.generic], Numbers, Numbers, Numbers]:
    """Read the `.idx`. Return the type of an id, the sizes, the pointers and the documents."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC):
        raise DataError(
            f"`{path}` must begin with {_MAGIC!r}, as the index of Megatron-LM's indexed dataset does, but begins with "
            f"{head[: len(_MAGIC)]!r}. Name the `.idx` beside the `.bin`."
        )
    if len(head) < _HEADER.size:
        raise _of_other_length(path, size, _HEADER.size)
    _, version, code, num_sequences, num_documents = _HEADER.unpack(head)
    if version != _VERSION:
        raise DataError(
            f"`{path}` must have version {_VERSION}, but has version {version}. "
            "Create the `.idx` file and its `.bin` file again."
        )
    dtype = np.dtype(DTYPES.get(code, "V1"))
    if dtype.kind not in "iu":
        what = dtype.name if code in DTYPES else f"of an unknown type (code {code})"
        raise DataError(
            f"The ids of `{path}` must be whole numbers, but are {what}. "
            "Create the `.idx` file and its `.bin` file again."
        )
    needed = _HEADER.size + num_sequences * 12 + num_documents * 8
    if size not in (needed, needed + num_sequences):
        raise _of_other_length(path, size, needed)
    pointers = _HEADER.size + num_sequences * 4
    return (
        dtype,
        _numbers(path, np.dtype("<i4"), num_sequences, _HEADER.size),
        _numbers(path, np.dtype("<i8"), num_sequences, pointers),
        _numbers(path, np.dtype("<i8"), num_documents, pointers + num_sequences * 8),
    )


def _of_other_length(path: Path, size: int, needed: int) -> DataError:
    return DataError(
        f"`{path}` must be {needed:,} bytes long, but has {size:,} bytes. The file is truncated or damaged. "
        "Get the `.idx` file and its `.bin` file again."
    )


def _numbers(path: Path, dtype: np.dtype[np.generic], length: int, offset: int) -> Numbers:
    return np.fromfile(path, dtype=dtype, count=length, offset=offset)


def _check_pointers(path: Path, sizes: Numbers, pointers: Numbers, width: int) -> None:
    expected = 0
    for start in range(0, len(sizes), _AT_ONCE):
        some = sizes[start : start + _AT_ONCE]
        ends = expected + np.cumsum(some, dtype=np.int64) * width
        begins = np.concatenate([[expected], ends[:-1]])
        wrong = np.flatnonzero((some < 0) | (pointers[start : start + _AT_ONCE] != begins))
        if len(wrong):
            number = start + int(wrong[0])
            raise DataError(
                f"`{path}` must start each sequence at the end of the previous sequence, but sequence {number:,} with "
                f"{int(sizes[number]):,} ids begins at byte {int(pointers[number]):,} instead of "
                f"{int(begins[wrong[0]]):,}. Create the `.idx` file and its `.bin` file again."
            )
        expected = int(ends[-1])


def _check_documents(path: Path, documents: Numbers, num_sequences: int) -> None:
    whole = len(documents) > 0 and documents[0] == 0 and documents[-1] == num_sequences
    if not whole or np.any(documents[1:] < documents[:-1]):
        raise DataError(
            f"`{path}` must list the first sequence of each document in ascending order, starting at 0 and ending with "
            f"{num_sequences:,}, but does not. Create the `.idx` file and its `.bin` file again."
        )
