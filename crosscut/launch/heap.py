"""Settings of the C library's heap, which decide how much freed memory a rank returns to the system.

The settings have an effect with glibc only.
"""

import ctypes
import os
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of two parameters of glibc's `mallopt`: the amount of free memory that is kept at the end of the heap, and
the minimum size of a block that gets its own pages.
"""

_KEPT_BYTES, _OWN_PAGES_BYTES = 64 << 20, 8 << 20
"""Values in bytes: the amount of free memory that is kept at the end of the heap, and the minimum size of a tensor
whose memory is returned to the system when the tensor is freed.
"""

LEAN_BYTES = 2 << 20
"""Value for the argument `least` of `give_freed_tensors_back`, in bytes, for runs that accept slower steps to save
memory.
"""

HEAP_SETTINGS = frozenset({"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"})
"""Environment variables that configure the heap. If a user has set any of them, Crosscut does not change the heap."""


def use_huge_pages() -> None:
    """Let the kernel give tensors of at least 2 MiB pages of 2 MiB where it can. Call this function before the first
    tensor is made, because PyTorch reads the setting only once. A setting of the user's own stays.

    A tensor that has been returned to the system takes new pages when it is made again. With ordinary pages, the 2,048
    page faults of 8 MiB take longer than the zeroing of the memory. On an AMD EPYC, a product of 2,048 x 512 x 2,048
    and its activation take 1.33 times as long in new pages as in kept memory, and 1.12 times as long in huge ones.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def give_freed_tensors_back(least: int = _OWN_PAGES_BYTES) -> None:
    """Make the heap return every freed tensor of at least `least` bytes to the system. The default is 8 MiB.

    By default, glibc keeps freed blocks of up to 32 MiB. Small objects are then allocated inside a freed block, so the
    next activations of the same size no longer fit into the block, and the heap grows. A smaller `least` avoids such
    unusable blocks but costs time, because each new MiB of memory takes 0.2 ms. Measurements:

    | `least`       | effect                                                                                         |
    |---------------|------------------------------------------------------------------------------------------------|
    | glibc's own   | 70 to 100 MiB of unusable blocks                                                               |
    | 4 MiB         | peak memory as with 8 MiB, but steps 4 to 7% longer (10 to 13% with smaller activations)       |
    | 8 MiB         | if whole layers are recomputed, activations of 3 MiB leave 150 MiB of unusable blocks (a sixth |
    |               | of all memory); `LEAN_BYTES` is for such runs                                                  |
    """
    if HEAP_SETTINGS & os.environ.keys():
        return
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, least)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Return the memory pages of all freed blocks to the system. This takes a few milliseconds.

    Call this function after many tensors were replaced by larger tensors, which do not fit into the freed blocks.
    """
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
