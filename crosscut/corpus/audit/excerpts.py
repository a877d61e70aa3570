"""Excerpts: the piece of a text that shows why something happened to it."""

from __future__ import annotations

LENGTH = 600
"""Characters of an excerpt."""

LEAD = 120
"""Characters that stand before what an excerpt is about."""

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def excerpt(text: str, at: int = 0) -> str:
    """A piece of `text` that begins a little before character `at`, with an ellipsis where something is left out."""
    start = _start(text, at)
    before = ELLIPSIS if start else ""
    after = ELLIPSIS if start + LENGTH < len(text) else ""
    return before + text[start : start + LENGTH] + after


def excerpts_of_pair(one: str, other: str) -> tuple[str, str]:
    """Pieces of two texts around the place where they first differ; their beginnings where they are the same."""
    at = 0 if one == other else common_beginning(one, other)
    return excerpt(one, at), excerpt(other, at)


def _start(text: str, at: int) -> int:
    """Where a word begins, some characters before `at`; where texts are the same up to `at`, the same place in both."""
    if at <= LEAD:
        return 0
    blank = text.find(" ", at - LEAD, at)
    return blank + 1 if blank >= 0 else at - LEAD


def common_beginning(one: str, other: str) -> int:
    """Number of characters that two texts share at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
