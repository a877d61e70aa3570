"""Likely causes of a difference: patterns that typical bugs of tensor parallelism leave in the numbers.

The proof looks for the first tensor that differs from the uncut model's tensor, and tries the patterns in order on this
tensor. The report gives the cause of the first pattern that fits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config.axes import AxisRole
from crosscut.verification.assembly import Assembled, Grid, distance
from crosscut.verification.recording import TensorKind


class StepDifference(NamedTuple):
    """First tensor that differs between the cut model (split over the ranks) and the uncut model (whole, on one rank),
    with its values in both models.
    """

    kind: TensorKind
    uncut: Tensor
    assembled: Assembled | None
    grid: Grid
    tolerance: float
    is_sent: bool = False
    """Whether another part of the model, perhaps on another stage, sent the tensor: the input of this part, or the
    gradient of its output.
    """


def usual_cause(difference: StepDifference) -> str:
    """Return the message for the first pattern that fits: the likely cause, and what to check in the code."""
    if difference.assembled is None:
        return _SHAPES_DO_NOT_FIT if difference.grid.axes else _told_missing(difference.kind)
    for fits, cause in _PATTERNS:
        if found := fits(difference, difference.assembled):
            return cause if isinstance(cause, str) else cause(found)
    return _GENERIC[difference.kind, difference.is_sent]


def is_arrangement(difference: StepDifference) -> bool:
    """Whether the ranks hold the right numbers in another order, or hold summands of the right numbers."""
    assembled = difference.assembled
    if assembled is None:
        return False
    row, whole = difference.grid.line(AxisRole.CUTS), difference.uncut
    is_summed = _adds_up(row, whole[: row[0].shape[0]] if whole.dim() else whole, difference)
    return is_summed or (not assembled.copies_differ and _is_reordered(difference, assembled))


def _close(a: Tensor, b: Tensor, difference: StepDifference) -> bool:
    if a.shape != b.shape:
        return False
    finite = difference.uncut.double().abs().masked_fill(~difference.uncut.isfinite(), 0.0)
    scale = finite.max().clamp_min(1e-300)
    tolerance = difference.tolerance
    # The bound of 0.1 keeps a large tolerance from making any two tensors close.
    return bool(distance(a, b).max() <= min(10 * tolerance, max(tolerance, 0.1)) * scale)


def _told_missing(kind: TensorKind) -> str:
    passes, of_ = ("forward", "output") if kind is TensorKind.OUTPUT else ("backward", "gradient")
    return (
        f"The {passes} pass of the cut model does not reach this place, or only on some of its ranks: no {of_} was "
        "recorded. Check the schedule of the passes, and whether every rank runs all of them."
    )


def _not_finite(difference: StepDifference, assembled: Assembled) -> bool:
    return bool(difference.uncut.isfinite().all()) and not bool(assembled.whole.isfinite().all())


def _sum_is_missing(difference: StepDifference, _: object = None) -> bool:
    """Whether the ranks' parts differ and their sum is the value that each rank should hold."""
    row, whole = difference.grid.line(AxisRole.CUTS), difference.uncut
    return _is_sum(row, whole[: row[0].shape[0]] if whole.dim() else whole, difference)


def _data_sum_is_missing(difference: StepDifference, _: object) -> bool:
    return _is_sum(difference.grid.line(AxisRole.TOKENS), difference.uncut, difference)


def _is_sum(parts: list[Tensor], whole: Tensor, difference: StepDifference) -> bool:
    """Whether `parts` differ from each other and add up to `whole`."""
    are_equal = all(torch.equal(parts[0], part) for part in parts[1:])
    return not are_equal and _adds_up(parts, whole, difference)


def _adds_up(parts: list[Tensor], whole: Tensor, difference: StepDifference) -> bool:
    """Whether `parts`, which may be equal, add up to `whole`."""
    if any(part.shape != parts[0].shape for part in parts):
        return False
    return _close(torch.stack(parts).sum(0), whole, difference)


def _factor(difference: StepDifference, assembled: Assembled) -> float | None:
    """Return the factor by which the cut result differs from the uncut result, if the factor is the size of an axis or
    the reciprocal of this size. Otherwise, return None.
    """
    sizes = {float(size) for size in difference.grid.axes.values()} - {1.0}
    for factor in sorted({f for size in sizes for f in (size, 1 / size)}):
        if _close(assembled.whole, factor * difference.uncut, difference):
            return factor
    return None


def _told_factor(factor: float) -> str:
    if factor > 1:
        return (
            f"The value is {factor:.0f} times the right value: a sum over an axis is made once too often. Check the "
            "reductions."
        )
    return (
        f"The value is 1/{1 / factor:.0f} of the right value: a sum over an axis is missing, or a value that is "
        "already normalised is averaged over an axis."
    )


def _multiple(difference: StepDifference, assembled: Assembled) -> float | None:
    """Return the number by which every element of the uncut result was multiplied, or None if there is no such
    number.
    """
    if difference.uncut.numel() < 2 or not difference.uncut.is_floating_point():
        return None
    whole, uncut = assembled.whole.double().flatten(), difference.uncut.double().flatten()
    number = float(whole @ uncut / (uncut @ uncut).clamp_min(1e-300))
    return number if number and _close(assembled.whole, number * difference.uncut, difference) else None


def _told_multiple(number: float) -> str:
    return (
        f"Every number is {number:.4g} times the right number: check the factors in this place, such as the 1 / (1 - "
        "p) of dropout, the scale of attention, and the number by which a sum is divided."
    )


def _is_reordered(difference: StepDifference, assembled: Assembled) -> bool:
    whole, uncut = (tensor.flatten().double().sort().values for tensor in (assembled.whole, difference.uncut))
    return bool(uncut.numel()) and _close(whole, uncut, difference)


def _same_at_every_token(difference: StepDifference, assembled: Assembled) -> bool:
    """Whether the difference is the same vector at every token."""
    if difference.kind is not TensorKind.OUTPUT or difference.is_sent:
        return False
    if difference.uncut.dim() < 2 or not difference.uncut.is_floating_point():
        return False
    error = (assembled.whole.double() - difference.uncut.double()).flatten(0, -2)
    return error.shape[0] > 1 and _close(error, error[:1].expand_as(error), difference)


def _copies_differ(_: StepDifference, assembled: Assembled) -> bool:
    return bool(assembled.copies_differ)


def _only_copies_differ(difference: StepDifference, assembled: Assembled) -> bool:
    return bool(assembled.copies_differ) and _close(assembled.whole, difference.uncut, difference)


_SHAPES_DO_NOT_FIT = "The ranks' shapes do not add up to the uncut shape: a dimension is not cut, or is cut twice."
_SUM_IS_MISSING = (
    "Each tensor rank holds only its part of a sum: an all-reduce over the tensor ranks is missing. Check the forward "
    "all-reduce after a row-parallel layer, the backward all-reduce before a column-parallel layer, and, for a "
    "replicated parameter that sees only a part of the tokens or of the heads, the sum of its gradients."
)
_OFF_BY_A_VECTOR = (
    "The output is off by the same vector at every token: every rank adds a bias that only one rank should add, "
    "no rank adds it, or a rank adds the wrong part of it."
)
_REORDERED = (
    "The same numbers appear in another order: check how columns, heads, tokens and sequences are distributed over the "
    "ranks, and in which order messages hold them."
)
_COPIES_DIFFER = (
    "Replicas differ between ranks: a sum over the ranks is missing, or an operation that must be identical on all "
    "ranks (dropout, a scatter) differs."
)

_Pattern = Callable[[StepDifference, Assembled], float | None]
"""Function that returns a true value, or a number other than 0, if a pattern fits."""

_PATTERNS: tuple[tuple[_Pattern, str | Callable[[float], str]], ...] = (
    (_not_finite, "The value is not finite, or padding rows of the vocabulary are not zero: check the padding."),
    (_sum_is_missing, _SUM_IS_MISSING),
    (_data_sum_is_missing, "Each data or context rank holds only its own term: the sum over these ranks is missing."),
    (_only_copies_differ, _COPIES_DIFFER),
    (_factor, _told_factor),
    (_multiple, _told_multiple),
    (_same_at_every_token, _OFF_BY_A_VECTOR),
    (_is_reordered, _REORDERED),
    (_copies_differ, _COPIES_DIFFER),
)

_GENERIC = {
    (TensorKind.OUTPUT, False): (
        "The module's input agrees, but its output does not: check how the module uses this rank's index (offsets, "
        "masks, slices), and the collective in its forward pass."
    ),
    (TensorKind.OUTPUT, True): (
        "The parts of the model before this one return the right outputs, but another input arrives here: check the "
        "code between them and, in a pipeline, what the previous stage sends, and to which micro-batch and stage the "
        "message belongs."
    ),
    (TensorKind.RETURNED, False): (
        "The gradient of the module's output agrees, but the gradient of its input does not: check the collective in "
        "the module's backward pass and the tensors that the module saved for the backward pass."
    ),
    (TensorKind.RETURNED, True): (
        "The modules behind this module return the right gradients, but another gradient arrives at the module's "
        "output: check what the next pipeline stage sends back, and to which micro-batch and stage the gradient goes."
    ),
    (TensorKind.GRADIENT, False): (
        "The gradients of activations agree, but a parameter's gradient does not: check over which uses of the "
        "parameter, which ranks and which micro-batches the gradient is summed."
    ),
}
