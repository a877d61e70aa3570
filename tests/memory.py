"""Memory that a piece of code takes."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Require that the Python objects that are created inside the context never take more than `num_bytes` together."""
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= num_bytes, f"{most:,} bytes were taken"
