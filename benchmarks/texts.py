"""Texts that benchmarks read: those of files, and the first of some texts."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from crosscut.data import read_documents

_T = TypeVar("_T")


def read_texts(*patterns: str) -> Iterator[str]:
    """Texts of files, named as in `data.text`."""
    return (document.text for document in read_documents(patterns))


def addresses() -> Iterator[str]:
    """State of the Union addresses, which come with Crosscut."""
    return read_texts("builtin:state-of-the-union")


def take(items: Iterable[_T], most: float, size: Callable[[Any], int] = len) -> Iterator[_T]:
    """First items whose sizes together reach `most`. No item behind them is read."""
    for item in items:
        yield item
        most -= size(item)
        if most <= 0:
            return
