"""Numbers in a file, read on demand and without a memory map.

If another program truncates a file that is mapped into memory, the next access kills this process with SIGBUS, without
a message. A read from an open file merely returns fewer bytes, and this can be reported as an error.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DamagedDataError, DataError
from crosscut.data.text.sources import unreadable

_REMEDY = (
    "Checkpoints that have been written are safe. Restore the file or make it again, then resume the run from its last "
    "checkpoint."
)


class ArrayFile:
    """One-dimensional array in a file. Slices and elements are read on access, as read-only arrays.

    Several threads may read at the same time. The file stays open as long as the object exists, so the old content is
    still read if the file is deleted or replaced.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, length: int, *, offset: int = 0) -> None:
        """Open a file of `length` elements that begin at byte `offset`. Raises `DataError` if it cannot be opened."""
        self.path, self.dtype, self._length, self._offset = path, np.dtype(dtype), length, offset
        self._width = self.dtype.itemsize
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(str(path), error) from None
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._opened = self._state()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: slice | int) -> Any:
        """Read a slice without a step, or one element.

        Raises `DamagedDataError` if the file has become too short, and `DataError` if the operating system cannot
        read it.
        """
        if isinstance(key, slice):
            start, stop, _ = key.indices(self._length)
            return self._read(start, max(stop - start, 0))
        if not -self._length <= key < self._length:
            raise IndexError(
                f"The index must be below {self._length:,}, the number of elements in `{self.path}`, but is {key}."
            )
        return self._read(key % self._length, 1)[0]

    def check_unchanged(self) -> None:
        """Raise `DamagedDataError` if a program has written to the file or truncated it since it was opened."""
        size, modified = self._state()
        if size != self._opened[0]:
            raise self._changed(f"now has {size:,} bytes instead of {self._opened[0]:,}")
        if modified != self._opened[1]:
            raise self._changed("another program has written to it")

    def _read(self, start: int, count: int) -> npt.NDArray[np.generic]:
        place, size = self._offset + start * self._width, count * self._width
        try:
            data = os.pread(self._descriptor, size, place)
            while len(data) < size:  # a single read returns at most 2 GB
                more = os.pread(self._descriptor, size - len(data), place + len(data))
                if not more:
                    self.check_unchanged()
                    raise self._changed(f"ends at byte {place + len(data):,}")
                data += more
        except OSError as error:
            what = error.strerror or error
            raise DataError(f"`{self.path}` must be readable, but reading failed: {what}. {_REMEDY}") from None
        return np.frombuffer(data, self.dtype)

    def _state(self) -> tuple[int, int]:
        """Size in bytes, and time of the last change."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _changed(self, what: str) -> DamagedDataError:
        return DamagedDataError(f"`{self.path}` must not change while it is read, but {what}. {_REMEDY}")
