r"""Tolerance for the difference of two correct computations of the same numbers; derived in `docs/verification.md`.

Cutting a sum changes the order of its additions. With the unit roundoff u_a of what products are added up in and
K summands, the two results differ by about sqrt(K) u_a of their size, since roundings are as often up as down; storing
them in the activations' type adds u. Over the N layers that a number passes, this grows with sqrt(N):

    tolerance = 8 sqrt(N) (u + sqrt(K) u_a)

relative to the largest element of the tensor. 8 leaves room for the largest of many elements.

Where numbers are narrower than the parameters, some sums nearly cancel, and what is left of them is mostly rounding.
How much is seen in the uncut model: a tensor may also differ by `ROUNDINGS` times what it is off from the same step in
the parameters' own type. That it is rounding, and no fault of the narrow computation, is bounded in turn, by
`Rounding`.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

SAFETY = 8.0
ROUNDINGS = 4.0
"""Results that are each off by as much differ by up to twice that, and the largest of many elements by some more."""
MOST = 0.5
"""Largest relative difference that may count as rounding: a number more than half wrong has not been rounded."""
BACKWARD = 3.0
"""Gradients have come through both passes, and nearly cancel in part."""
_ACCUMULATION = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float8_e4m3fn: torch.float32}


def tolerance_of(dtype: torch.dtype, *, num_layers: int, num_summands: int) -> float:
    """The largest relative difference that rounding explains, for activations of `dtype`."""
    own, sums = unit_roundoff(dtype), unit_roundoff(_ACCUMULATION.get(dtype, dtype))
    return SAFETY * math.sqrt(num_layers) * (own + math.sqrt(num_summands) * sums)


@dataclass(frozen=True)
class Rounding:
    """Largest difference of numbers from their unrounded values, relative to the largest number of their tensor."""

    outputs: float
    """Bound for outputs and the loss."""
    gradients: float
    """Bound for gradients and their norm."""


def rounding_of(dtype: torch.dtype, *, num_layers: int, num_summands: int) -> Rounding:
    """The largest differences that rounding explains where products take numbers of `dtype`."""
    tolerance = tolerance_of(dtype, num_layers=num_layers, num_summands=num_summands)
    return Rounding(outputs=min(MOST, tolerance), gradients=min(MOST, BACKWARD * tolerance))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def num_layers_of(model: nn.Module) -> int:
    """N: modules with parameters of their own."""
    return sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())


def num_summands_of(model: nn.Module, num_tokens: int) -> int:
    """K: the longest sum, over a parameter's dimension or over the tokens of a weight's gradient."""
    return max(num_tokens, *(max(parameter.shape, default=1) for parameter in model.parameters()))
