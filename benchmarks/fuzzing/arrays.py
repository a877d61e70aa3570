"""Hostile arrays in a file of NumPy: `.npz`, by the name of the damage. The file stays a valid archive."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = Any


def _with_last(array: Array, value: int) -> Array:
    changed = array.copy()
    if changed.size and changed.dtype.kind in "iu":
        changed.flat[-1] = np.asarray(value).astype(changed.dtype)
    return changed


ARRAYS: Mapping[str, Callable[[Array], Array]] = {
    "nothing": lambda array: array[:0],
    "shorter": lambda array: array[:-1],
    "longer": lambda array: np.concatenate([array, array[-1:]]),
    "twice": lambda array: np.concatenate([array, array]),
    "reversed": lambda array: array[::-1],
    "flat": lambda array: array.reshape(-1),
    "deeper": lambda array: array[..., None],
    "one number": lambda _: np.array(3),
    "zeros": np.zeros_like,
    "negative last": lambda array: _with_last(array, -5),
    "large last": lambda array: _with_last(array, 1_000_000),
    "largest last": lambda array: _with_last(array, 2**63 - 1 if array.dtype.itemsize == 8 else 2**31 - 1),
    "fractions": lambda array: np.zeros(array.shape, dtype=np.float32) + 0.5,
    "not a number": lambda array: np.full(array.shape, np.nan),
    "truth values": lambda array: np.ones(array.shape, dtype=np.bool_),
    "bytes": lambda array: np.zeros(array.shape, dtype=np.uint8),
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "complex": lambda array: np.zeros(array.shape, dtype=np.complex64),
    "texts": lambda array: np.full(array.shape, "\x1b[2J", dtype=np.str_),
    "objects": lambda array: np.full(array.shape, None, dtype=object),
    "records": lambda array: np.zeros(array.shape, dtype=[("a", np.int32)]),
    "dates": lambda array: np.zeros(array.shape, dtype="datetime64[s]"),
}
"""Damages of one array."""


def names_of(content: bytes) -> list[str]:
    """Names of the arrays in a file."""
    return list(np.load(io.BytesIO(content), allow_pickle=False).files)


def damaged_arrays(content: bytes, damages: Mapping[str, str]) -> bytes:
    """Content of a file after the damages of its arrays, by their names. The damage "missing" removes an array."""
    arrays = dict(np.load(io.BytesIO(content), allow_pickle=False))
    for name, damage in damages.items():
        if damage == "missing":
            del arrays[name]
        else:
            arrays[name] = ARRAYS[damage](arrays[name])
    written = io.BytesIO()
    np.savez_compressed(written, **arrays)
    return written.getvalue()
