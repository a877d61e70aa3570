"""Rotary positions: each pair of a head's elements is rotated by an angle proportional to the token's position.

    angle(place, i) = place * base^(-2 i / D)          i = 0 ... D/2 - 1, the pair of elements i and i + D/2

The product of a query and a key then depends on the distance between them (Su et al. 2021, arXiv 2104.09864, section
3.2). Elements are paired as in Llama's published weights, and angles are computed in float32 in every precision, as in
Llama.

Shapes: B batch, A heads, S sequence, D elements of a head.
"""

import math

import torch
from torch import Tensor

from crosscut.config import ModelConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, which are the same in all layers."""

LOW, HIGH = 1.0, 4.0
"""Limits of low and high frequencies, in turns within `rotary_original_length` positions: below `LOW`, a frequency is
low; above `HIGH`, a frequency is high.
"""


def rotations(places: Tensor, config: ModelConfig, dtype: torch.dtype) -> Rotation:
    """Compute cosines and sines for tokens at `places`. For `places` [S], both results are [S, D]; for [B, S], both are
    [B, 1, S, D].

    The sines for the first element of each pair are negated, because `rotate` expects negated sines.
    """
    angles = places.float().unsqueeze(-1) * _frequencies(config, places.device)
    if angles.dim() > 2:
        angles = angles.unsqueeze(1)  # for all heads of a row
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys [B, A, S, D] by the cosines and sines that `rotations` returns."""
    cos, sin = rotation
    turned: Tensor = x * cos + x.roll(x.shape[-1] // 2, -1) * sin
    return turned


def _frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Return the frequencies in radians per position [D/2]. As in Llama 3.1, low frequencies are divided by
    `rotary_factor`, and frequencies between low and high are interpolated.
    """
    exponents = torch.arange(0, config.head_size, 2, device=device).float() / config.head_size
    frequencies: Tensor = 1.0 / (config.rotary_base**exponents)
    if config.rotary_factor == 1.0:
        return frequencies
    turns = config.rotary_original_length / (2 * math.pi / frequencies)  # same order as in Llama's code
    share = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0)  # 0 for low frequencies, 1 for high ones
    return (1 - share) * frequencies / config.rotary_factor + share * frequencies
