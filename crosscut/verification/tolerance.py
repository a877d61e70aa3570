r"""Tolerance for the difference between two correct computations of the same numbers (derived in
`docs/verification.md`).

Cutting a sum changes the order of its additions. Let u_a be the unit roundoff of the type in which products are summed,
and K the number of summands. The two results then differ by about sqrt(K) u_a relative to their size, because rounding
goes up as often as down. Storing the results in the activations' type adds u. Over the N layers that a number passes
through, the difference grows with sqrt(N):

    tolerance = 8 sqrt(N) (u + sqrt(K) u_a)

relative to the largest element of the tensor. The factor 8 allows for the largest of many elements.

If the types are narrower than the parameters' type, some sums nearly cancel, and the rest is mostly rounding. The uncut
model shows how much: it is also computed in the parameters' own type, and a tensor may differ by `ROUNDINGS` times its
distance from this result. `Rounding` limits this distance, so that a bug in the narrow computation does not count as
rounding.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

SAFETY = 8.0
ROUNDINGS = 4.0
"""Allowed multiple of the rounding. Two results with the same rounding error differ by up to twice the error; the
largest of many elements may differ by more.
"""
MOST = 0.5
"""Largest relative difference that may count as rounding: beyond one half, a number is wrong, not rounded."""
BACKWARD = 3.0
"""Factor for gradients, which have passed through both passes and nearly cancel in places."""
_ACCUMULATION = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float8_e4m3fn: torch.float32}


def tolerance_of(dtype: torch.dtype, *, num_layers: int, num_summands: int) -> float:
    """Largest relative difference that rounding explains, for activations of type `dtype`."""
    own, sums = unit_roundoff(dtype), unit_roundoff(_ACCUMULATION.get(dtype, dtype))
    return SAFETY * math.sqrt(num_layers) * (own + math.sqrt(num_summands) * sums)


@dataclass(frozen=True)
class Rounding:
    """Allowed difference from the unrounded values, relative to the largest element of the tensor."""

    outputs: float
    """Bound for outputs and the loss."""
    gradients: float
    """Bound for gradients and their norm."""


def rounding_of(dtype: torch.dtype, *, num_layers: int, num_summands: int) -> Rounding:
    """Largest relative differences that rounding explains, if products take factors of type `dtype`."""
    tolerance = tolerance_of(dtype, num_layers=num_layers, num_summands=num_summands)
    return Rounding(outputs=min(MOST, tolerance), gradients=min(MOST, BACKWARD * tolerance))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next larger number of the type."""
    return torch.finfo(dtype).eps / 2


def num_layers_of(model: nn.Module) -> int:
    """N: number of modules with parameters of their own."""
    return sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())


def num_summands_of(model: nn.Module, num_tokens: int) -> int:
    """K: length of the longest sum, over a parameter's dimension or over the tokens of a weight gradient."""
    return max(num_tokens, *(max(parameter.shape, default=1) for parameter in model.parameters()))
