r"""Tolerance for the difference between two correct computations of the same numbers (derived in
`docs/verification.md`).

Cutting a sum changes the order of its additions. Let u_a be the unit roundoff of the type in which products are summed,
and K the number of summands. The two results then differ by about sqrt(K) u_a relative to their size, because rounding
goes up as often as down. Storing the results in the activations' type adds u, the unit roundoff of this type. Over the
N layers that a number passes through, the difference grows with sqrt(N):

    tolerance = 8 sqrt(N) (u + sqrt(K) u_a)

relative to the largest element of the tensor. The factor 8 allows for the largest error among many elements.

If the types are narrower than the parameters' type, some sums nearly cancel, and what is left is mostly rounding. To
measure this rounding, the uncut model also takes the step in the parameters' own type. A tensor may then differ by
`ROUNDINGS` times the distance between the two results of the uncut model. `Rounding` limits this distance, so that a
bug in the narrow computation does not count as rounding.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

SAFETY = 8.0
ROUNDINGS = 4.0
"""Factor between a tensor's own rounding error and the difference that is allowed for the tensor. Two results with the
same rounding error differ by up to twice the error. The largest difference among many elements may be larger.
"""
MOST = 0.5
"""Largest relative difference that may count as rounding. A number that is off by more than one half is wrong, not
rounded.
"""
BACKWARD = 3.0
"""Factor between the bound for outputs and the larger bound for gradients. Gradients collect the rounding of the
forward and the backward pass, and some of their sums nearly cancel.
"""
_ACCUMULATION = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float8_e4m3fn: torch.float32}


def tolerance_of(dtype: torch.dtype, *, num_layers: int, num_summands: int) -> float:
    """Largest relative difference that rounding can explain, for activations of type `dtype`. `num_layers` is N and
    `num_summands` is K in the formula of this module.
    """
    own, sums = unit_roundoff(dtype), unit_roundoff(_ACCUMULATION.get(dtype, dtype))
    return SAFETY * math.sqrt(num_layers) * (own + math.sqrt(num_summands) * sums)


@dataclass(frozen=True)
class Rounding:
    """Allowed differences from the unrounded values, relative to the largest element of each tensor."""

    outputs: float
    """Bound for outputs and the loss."""
    gradients: float
    """Bound for gradients and their norm."""


@dataclass(frozen=True)
class Bounds:
    """Largest differences that rounding can explain, relative to the largest element of each tensor."""

    tolerance: float
    """Allowed difference between the cut and the uncut step."""
    rounding: Rounding
    """Allowed differences between the uncut step and the unrounded step."""


def rounding_of(dtype: torch.dtype, *, num_layers: int, num_summands: int) -> Rounding:
    """Largest relative differences that rounding can explain, for matrix products with factors of type `dtype`.
    `num_layers` is N and `num_summands` is K in the formula of this module.
    """
    tolerance = tolerance_of(dtype, num_layers=num_layers, num_summands=num_summands)
    return Rounding(outputs=min(MOST, tolerance), gradients=min(MOST, BACKWARD * tolerance))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff of a type: half the distance from 1 to the next larger number."""
    return torch.finfo(dtype).eps / 2


def num_layers_of(model: nn.Module) -> int:
    """N in the formula at the top of this file: number of `nn.Module`s in the model that own parameters directly."""
    return sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())


def num_summands_of(model: nn.Module, num_tokens: int) -> int:
    """K in the formula at the top of this file: length of the longest sum, over a dimension of a parameter or, for a
    weight's gradient, over the tokens.
    """
    return max(num_tokens, *(max(parameter.shape, default=1) for parameter in model.parameters()))
