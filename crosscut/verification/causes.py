"""Usual causes of a difference: patterns that faults of tensor parallelism leave in the numbers.

Each pattern is tried on the parts of the first thing that differs; the first that fits is told.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config.axes import Role
from crosscut.verification.assembly import Assembled, Grid, distance


class Difference(NamedTuple):
    """The first thing that differs."""

    kind: str
    """`output`, `returned` gradient or parameter `gradient`."""
    uncut: Tensor
    assembled: Assembled | None
    grid: Grid
    tolerance: float


def usual_cause(difference: Difference) -> str:
    """A sentence on where to look."""
    for fits, cause in _PATTERNS:
        if fits(difference):
            return cause(difference) if callable(cause) else cause
    return _GENERIC[difference.kind]


def is_arrangement(difference: Difference) -> bool:
    """Whether the ranks hold the right numbers, only as parts of a sum or in an order of their own."""
    return _sum_is_missing(difference) or (difference.assembled is not None and _is_reordered(difference))


def _close(a: Tensor, b: Tensor, difference: Difference) -> bool:
    if a.shape != b.shape:
        return False
    finite = difference.uncut.double().abs().masked_fill(~difference.uncut.isfinite(), 0.0)
    scale = finite.max().clamp_min(1e-300)
    tolerance = difference.tolerance
    return bool(distance(a, b).max() <= min(10 * tolerance, max(tolerance, 0.1)) * scale)  # else anything were close


def _shapes_do_not_fit(difference: Difference) -> bool:
    return difference.assembled is None


def _not_finite(difference: Difference) -> bool:
    if difference.assembled is None or not difference.uncut.isfinite().all():
        return False
    return not bool(difference.assembled.whole.isfinite().all())


def _sum_is_missing(difference: Difference) -> bool:
    """The ranks' parts differ, and their sum is what each should hold."""
    row = difference.grid.line(Role.CUTS)
    if len(row) == 1 or all(torch.equal(row[0], part) for part in row[1:]):
        return False
    whole = difference.uncut
    return _close(torch.stack(row).sum(0), whole[: row[0].shape[0]] if whole.dim() else whole, difference)


def _data_sum_is_missing(difference: Difference) -> bool:
    parts = difference.grid.line(Role.TOKENS)
    if len(parts) == 1 or all(torch.equal(parts[0], part) for part in parts[1:]):
        return False
    return _close(torch.stack(parts).sum(0), difference.uncut, difference)


def _factor(difference: Difference) -> float | None:
    """K where the cut result is k times the uncut one, for the k that axes make."""
    if difference.assembled is None:
        return None
    sizes = {float(size) for size in difference.grid.axes.values()} - {1.0}
    for factor in sorted({f for size in sizes for f in (size, 1 / size)}):
        if _close(difference.assembled.whole, factor * difference.uncut, difference):
            return factor
    return None


def _is_scaled(difference: Difference) -> bool:
    return _factor(difference) is not None


def _told_factor(difference: Difference) -> str:
    factor = _factor(difference)
    assert factor is not None
    if factor > 1:
        return f"It is {factor:.0f} times what it should be: something is added up once too often over an axis."
    return (
        f"It is 1/{1 / factor:.0f} of what it should be: something that was normalised before is averaged over an "
        "axis, or a sum over one is missing."
    )


def _is_reordered(difference: Difference) -> bool:
    if difference.assembled is None or not difference.uncut.numel():
        return False
    return _close(
        difference.assembled.whole.flatten().double().sort().values,
        difference.uncut.flatten().double().sort().values,
        difference,
    )


def _same_at_every_token(difference: Difference) -> bool:
    """The difference is one vector, added to every token."""
    if difference.kind != "output" or difference.assembled is None or difference.uncut.dim() < 2:
        return False
    if not difference.uncut.is_floating_point():
        return False
    error = (difference.assembled.whole.double() - difference.uncut.double()).flatten(0, -2)
    return error.shape[0] > 1 and _close(error, error[:1].expand_as(error), difference)


def _copies_differ(difference: Difference) -> bool:
    return difference.assembled is not None and bool(difference.assembled.copies_differ)


def _only_copies_differ(difference: Difference) -> bool:
    if difference.assembled is None or not difference.assembled.copies_differ:
        return False
    return _close(difference.assembled.whole, difference.uncut, difference)


_SUM_IS_MISSING = (
    "Each tensor rank holds its part of a sum: an all-reduce over the tensor ranks is missing (forward: g; backward: "
    "f's; for a parameter that every rank holds whole: the sum under sequence parallelism)."
)
_OFF_BY_A_VECTOR = (
    "It is off by the same vector at every token: a bias is added once per rank, or left out, or not each rank's own "
    "part of it."
)
_REORDERED = (
    "The same numbers stand in another order: look at how columns, heads or the sequence are dealt to the ranks."
)
_COPIES_DIFFER = (
    "Ranks that should hold the same do not: a sum over the ranks is missing, or something that all must do alike "
    "(dropout, a scatter) each did for itself."
)

_PATTERNS: tuple[tuple[Callable[[Difference], bool], str | Callable[[Difference], str]], ...] = (
    (_shapes_do_not_fit, "The ranks' shapes do not add up to the uncut one: a dimension is not cut, or cut twice."),
    (_not_finite, "It is not finite, or rows that only fill up the vocabulary are not zero: look at the padding."),
    (_sum_is_missing, _SUM_IS_MISSING),
    (_data_sum_is_missing, "Each data rank holds its own gradient: the sum over the data ranks is missing."),
    (_only_copies_differ, _COPIES_DIFFER),
    (_is_scaled, _told_factor),
    (_same_at_every_token, _OFF_BY_A_VECTOR),
    (_is_reordered, _REORDERED),
    (_copies_differ, _COPIES_DIFFER),
)

_GENERIC = {
    "output": (
        "Its input agrees and its output does not: look at what it does with this rank's index (offsets, masks, "
        "slices) and at its forward collective."
    ),
    "returned": (
        "The gradient that came to it agrees and the one that it gave back does not: look at its backward collective "
        "and at what it saved for the backward pass."
    ),
    "gradient": (
        "The gradients of activations agree and a parameter's does not: look at which uses of the parameter, which "
        "ranks and which micro-batches are added up."
    ),
}
