"""Excerpts: the piece of a text that shows why something happened to it."""

from __future__ import annotations

LENGTH = 600
"""Characters of an excerpt."""

LEAD = 120
"""Characters that stand before what an excerpt is about."""

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def excerpt(text: str, at: int = 0, length: int = LENGTH) -> str:
    """A piece of `text` that begins a little before character `at`, with an ellipsis where something is left out."""
    start = max(0, min(at - LEAD, len(text) - length))
    end = start + length
    before = ELLIPSIS if start else ""
    after = ELLIPSIS if end < len(text) else ""
    return before + text[start:end] + after


def excerpts_of_pair(one: str, other: str, length: int = LENGTH) -> tuple[str, str]:
    """Pieces of two texts around the place where they first differ; their beginnings where they are the same."""
    at = 0 if one == other else common_beginning(one, other)
    return excerpt(one, at, length), excerpt(other, at, length)


def common_beginning(one: str, other: str) -> int:
    """How many characters two texts have in common at the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
