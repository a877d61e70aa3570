"""Texts that benchmarks of the corpus read: the first of them, and batches of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from crosscut.data import read_documents

_T = TypeVar("_T")
Size = Callable[[Any], int]


def addresses() -> Iterator[str]:
    """State of the Union addresses, which come with Crosscut."""
    return (document.text for document in read_documents(["builtin:state-of-the-union"], text_key="text"))


def take(items: Iterable[_T], most: float, size: Size = len) -> Iterator[_T]:
    """First items whose sizes together reach `most`. No item behind them is read."""
    for item in items:
        yield item
        most -= size(item)
        if most <= 0:
            return


def in_batches(items: Iterable[_T], least: int, size: Size = len) -> Iterator[list[_T]]:
    """Batches of items whose sizes together reach `least`. The last batch may be smaller."""
    batch: list[_T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
