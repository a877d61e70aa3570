"""Memory that a piece of code takes."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Require that the objects of Python in the context never take more than `num_bytes` together, without those of
    before.
    """
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= num_bytes, f"{most:,} bytes were taken"
