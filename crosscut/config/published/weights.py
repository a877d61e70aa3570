"""Files that hold a published model's weights, and comparison of two tensors in them.

A config may say that two tensors are the same although the files hold two tensors that differ. The comparison needs
neither torch nor the type of the values: it compares the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crosscut.config.errors import DamagedCheckpointError
from crosscut.config.system.files import load_json, parse_json, require_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MOST_HEADER = 100_000_000
"""Maximum size of the header of a safetensors file, in bytes, as in the library that reads these files."""
_BLOCK = 1 << 22


@dataclass(frozen=True)
class _Place:
    """Place of a tensor's values."""

    path: Path
    start: int
    stop: int
    form: tuple[object, ...]
    """Type and shape."""


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
        places = {name: place for path in weight_files(folder) for name, place in _places(path).items()}
        for ends in pairs:
            names = [next((name for name in places if f".{name}".endswith(f".{end}")), "") for end in ends]
            if all(names) and not _are_equal(*(places[name] for name in names)):
                return names[0], names[1]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, DamagedCheckpointError):
        return None
    return None


def _places(path: Path) -> dict[str, _Place]:
    """Read the places of all tensors of a safetensors file from its header."""
    require_regular(path)
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size)) if size <= _MOST_HEADER else {}
    places = {}
    for name in header.keys() - {"__metadata__"}:
        start, stop = header[name]["data_offsets"]
        form = (header[name]["dtype"], *header[name]["shape"])
        places[name] = _Place(path, 8 + size + start, 8 + size + stop, form)
    return places


def _are_equal(one: _Place, other: _Place) -> bool:
    """Whether two tensors have equal types, shapes and values."""
    if one.form != other.form or one.stop - one.start != other.stop - other.start:
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.stop - one.start
        while left > 0:
            values, others = first.read(min(left, _BLOCK)), second.read(min(left, _BLOCK))
            if values != others or not values:
                return values == others
            left -= len(values)
    return True
