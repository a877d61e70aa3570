"""Settings of the C library's heap: how much freed memory a rank keeps, and how much goes back to the system.

They act on glibc alone and do nothing under another C library.
"""

import ctypes
import os
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`: free memory that the heap's end keeps, and the size from which a block has its own
pages."""

_KEPT_BYTES, _OWN_PAGES_BYTES = 64 << 20, 8 << 20
"""The heap's end keeps 64 MiB. A freed tensor of 8 MiB or more goes back to the system."""

LEAN_BYTES = 2 << 20
"""Freed tensors from this size on go back to the system where a run trades time for memory."""

HEAP_SETTINGS = frozenset({"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"})
"""Environment variables by which a user sets how much the heap keeps. If one is set, Crosscut changes nothing."""


def give_freed_tensors_back(least: int = _OWN_PAGES_BYTES) -> None:
    """Return freed tensors of at least `least` bytes to the system from now on.

    By default glibc learns to keep freed blocks of up to 32 MiB in its heap. Small objects then settle in the holes, so
    the next activations of the same size no longer fit: a step held 70 to 100 MiB of such holes. New pages cost 0.2 ms
    per MiB, however. With a bound of 4 MiB, and with the trimming that glibc does once the first bound is set, a step
    took 4 to 7% longer (10 to 13% with smaller activations) for the same peak. Where whole layers are recomputed,
    activations of 3 MiB left holes of 150 MiB, a sixth of all memory.
    """
    if HEAP_SETTINGS & os.environ.keys():
        return
    with suppress(AttributeError, OSError, TypeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, least)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Return the pages of all freed blocks to the system, also those between blocks in use; takes some milliseconds.

    Call it after many tensors were replaced by larger ones, which do not fit into the freed places.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
