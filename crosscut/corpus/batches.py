"""Group items into batches of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def batches(items: Iterable[_Item], size_of: Callable[[_Item], int], limit: int) -> Iterator[list[_Item]]:
    """Group consecutive items into batches of a size up to `limit`. A larger item is a batch of its own."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
