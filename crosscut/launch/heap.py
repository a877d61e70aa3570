"""Settings of the C library's heap: how much freed memory a rank keeps, and how much it returns to the system.

The settings work with glibc and have no effect with other C libraries.
"""

import ctypes
import os
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`: the free memory kept at the end of the heap, and the size from which a block gets
pages of its own."""

_KEPT_BYTES, _OWN_PAGES_BYTES = 64 << 20, 8 << 20
"""Free memory kept at the end of the heap, in bytes, and size from which a freed tensor is returned to the system."""

LEAN_BYTES = 2 << 20
"""Size, in bytes, from which freed tensors are returned to the system in runs that trade time for memory."""

HEAP_SETTINGS = frozenset({"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"})
"""Environment variables with which a user configures the heap. If one of them is set, Crosscut changes nothing."""


def give_freed_tensors_back(least: int = _OWN_PAGES_BYTES) -> None:
    """Configure the heap to return freed tensors of at least `least` bytes to the system from now on.

    By default, glibc keeps freed blocks of up to 32 MiB in its heap. Small objects are then allocated in the holes,
    so the next activations of the same size no longer fit: a step held 70 to 100 MiB of such holes. On the other
    hand, new pages cost 0.2 ms per MiB. With a bound of 4 MiB, together with the trimming that glibc does once this
    bound is set, a step took 4 to 7% longer (10 to 13% with smaller activations) at the same peak. If whole layers
    are recomputed, activations of 3 MiB left holes of 150 MiB, a sixth of all memory.
    """
    if HEAP_SETTINGS & os.environ.keys():
        return
    with suppress(AttributeError, OSError, TypeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, least)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Return the pages of all freed blocks to the system, even between blocks in use. This takes a few milliseconds.

    Call it after replacing many tensors by larger tensors, which do not fit into the freed blocks.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
