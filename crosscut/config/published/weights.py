"""Files that hold a published model's weights, and comparison of two tensors in them.

A config may say that two tensors are the same although the files hold two tensors that differ. The comparison needs
no torch: it compares the bytes, or the values of two different types.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from crosscut.config.errors import DamagedCheckpointError
from crosscut.config.system.files import load_json, parse_json, require_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MOST_HEADER = 100_000_000
"""Maximum size of the header of a safetensors file, in bytes, as in the library that reads these files."""
_BLOCK = 1 << 19
"""Number of elements that are compared at once."""
_CODES = {"F64": ("d", 8), "F32": ("f", 4), "F16": ("e", 2), "BF16": ("f", 2)}
"""Code of a type in the module `struct`, and the number of bytes of an element."""


@dataclass(frozen=True)
class Place:
    """Place of a tensor's values: the bytes of the file from `start` to `stop`."""

    path: Path
    start: int
    stop: int
    dtype: str
    """Element type under safetensors' name, such as "BF16"."""
    shape: tuple[int, ...]
    changed: int
    """Time of the file's last change, in nanoseconds."""


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the files with a model's weights. As in `transformers`, a file with all weights has
    precedence over an index of several files. Raises `DamagedCheckpointError` for an index that cannot be read.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file() or not index.is_file():
        return [folder / SINGLE_FILE]
    try:
        names = sorted(set(load_json(index)["weight_map"].values()))
        if any("\0" in name for name in names):
            raise ValueError("a file's name contains a NUL character")
        return [index.with_name(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpointError(
            f"`{index}` must be an index that maps tensors to files, but cannot be parsed. Download the file again."
        ) from None


def notice_of_two_sets(folder: Path) -> str:
    """Line for the user if a folder holds two sets of weights. Empty otherwise."""
    if not all((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return ""
    return (
        f"`{folder}` holds two sets of weights. Crosscut reads `{SINGLE_FILE}`, as `transformers` does, and ignores "
        f"`{INDEX_FILE}` and its files."
    )


def differing(folder: Path, pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the names of the first pair of tensors that both exist and differ. A pair holds the ends of two names.
    Returns None if there is no such pair, and for files that cannot be read; reading the weights reports such files.
    """
    try:
        places = {name: place for path in weight_files(folder) for name, place in places_in(path).items()}
        for ends in pairs:
            names = [next((name for name in places if f".{name}".endswith(f".{end}")), "") for end in ends]
            if all(names) and not _are_equal(*(places[name] for name in names)):
                return names[0], names[1]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, DamagedCheckpointError):
        return None
    return None


def places_in(path: Path) -> dict[str, Place]:
    """Read the places of all tensors of a safetensors file from its header."""
    require_regular(path)
    changed = path.stat().st_mtime_ns
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size)) if size <= _MOST_HEADER else {}
    places = {}
    for name in (name for name in header if name != "__metadata__"):
        start, stop = header[name]["data_offsets"]
        dtype, shape = header[name]["dtype"], tuple(header[name]["shape"])
        places[name] = Place(path, 8 + size + start, 8 + size + stop, dtype, shape, changed)
    return places


@lru_cache(maxsize=16)
def _are_equal(one: Place, other: Place) -> bool:
    """Whether two tensors have equal shapes and values. Several commands compare the same tensors once more."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return all(first == second for first, second in zip(_blocks(one, 8), _blocks(other, 8), strict=True))
    if not {one.dtype, other.dtype} <= _CODES.keys():
        return False
    return all(
        _values(first, one.dtype) == _values(second, other.dtype)
        for first, second in zip(*(_blocks(place, _CODES[place.dtype][1]) for place in (one, other)), strict=True)
    )


def _blocks(place: Place, size: int) -> Iterator[bytes]:
    """Yield the bytes of a tensor. Each block has the same number of elements of `size` bytes."""
    with place.path.open("rb") as file:
        file.seek(place.start)
        for start in range(place.start, place.stop, _BLOCK * size):
            yield file.read(min(_BLOCK * size, place.stop - start))


def _values(block: bytes, dtype: str) -> tuple[float, ...]:
    """Values of elements. A bfloat16 is the upper half of a float32."""
    code, size = _CODES[dtype]
    if dtype == "BF16":
        whole = bytearray(2 * len(block))
        whole[2::4], whole[3::4] = block[::2], block[1::2]
        block, size = bytes(whole), 4
    return struct.unpack(f"<{len(block) // size}{code}", block)
