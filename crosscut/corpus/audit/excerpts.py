"""Excerpts: sections of a text that show why a document was dropped or changed."""

from __future__ import annotations

LENGTH = 600
"""Maximum number of characters in an excerpt, not counting ellipses."""

LEAD = 120
"""Maximum number of characters that an excerpt shows before its point of interest."""

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def excerpt(text: str, at: int = 0) -> str:
    """Section of `text` that begins shortly before character `at`. An ellipsis marks omitted text."""
    start = _start(text, at)
    before = ELLIPSIS if start else ""
    after = ELLIPSIS if start + LENGTH < len(text) else ""
    return before + text[start : start + LENGTH] + after


def excerpts_of_pair(one: str, other: str) -> tuple[str, str]:
    """Excerpts of two texts around their first difference, or from the beginning if the texts are equal."""
    at = 0 if one == other else common_beginning(one, other)
    return excerpt(one, at), excerpt(other, at)


def _start(text: str, at: int) -> int:
    """Position where the excerpt begins: the start of the first word in the `LEAD` characters before `at`.

    The position depends only on the text before `at`. The excerpts of two texts that first differ at `at` therefore
    begin at the same position.
    """
    if at <= LEAD:
        return 0
    blank = text.find(" ", at - LEAD, at)
    return blank + 1 if blank >= 0 else at - LEAD


def common_beginning(one: str, other: str) -> int:
    """Number of characters in the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
