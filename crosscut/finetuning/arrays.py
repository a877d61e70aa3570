"""Read and write files of arrays in the folder of a fine-tuned run. The module needs no torch."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from zipfile import BadZipFile

import numpy as np

from crosscut.config.errors import DataError
from crosscut.config.system.files import open_own

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Arrays = TypeVar("_Arrays", bound="DataclassInstance")
"""A dataclass whose fields are arrays."""

_DAMAGES = (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error, struct.error, OverflowError, MemoryError,
            RuntimeError)  # fmt: skip
"""Errors that numpy and zipfile raise for a damaged file. A flipped bit can make an entry look encrypted, compressed by
another method (`RuntimeError`), or larger than the memory."""


def save_arrays(arrays: "DataclassInstance", path: Path) -> None:
    """Write a dataclass of arrays to a file."""
    with open_own(path, "wb") as file:
        np.savez_compressed(file, **{field.name: getattr(arrays, field.name) for field in fields(arrays)})


def load_arrays(
    kind: type[_Arrays], path: Path, fits: Callable[[_Arrays], bool], *, content: str, remedy: str
) -> _Arrays:
    """Read a dataclass that `save_arrays` wrote. Raises `DataError` if the file cannot be read, or if `fits` returns
    false because the types, shapes and values of the arrays contradict each other. In the message, `content` says what
    the file must hold, and `remedy` says what to do.
    """
    try:
        # np.load would leave a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = kind(**{field.name: arrays[field.name] for field in fields(kind)})
        if not fits(found):
            raise ValueError("the types, shapes or values of its arrays contradict each other")
    except _DAMAGES as error:
        raise DataError(f"`{path}` must hold {content} of the run, but cannot be read: {error}. {remedy}") from None
    return found
