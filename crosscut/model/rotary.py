"""Rotary positions: each pair of a head's elements turns by an angle that grows with the token's place.

    angle(place, i) = place * base^(-2 i / D)          i = 0 ... D/2 - 1, the pair of elements i and i + D/2

so that the product of a query and a key depends on how far they are apart (Su et al. 2021, arXiv 2104.09864, section
3.2). Elements are paired as in Llama's published weights. Angles are computed in float32 in any precision, as there.

Shapes: B batch, A heads, S sequence, D elements of a head.
"""

import math

import torch
from torch import Tensor

from crosscut.config import ModelConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, one pair for all layers."""

LOW, HIGH = 1.0, 4.0
"""Turns within `rotary_original_length` below which a rotation is slow, and above which it is fast."""


def rotations(places: Tensor, config: ModelConfig, dtype: torch.dtype) -> Rotation:
    """For tokens at `places` [S] or [B, S]: [S, D] or [B, 1, S, D] each.

    The sines of a pair's first element are negative, as `rotate` needs them.
    """
    angles = places.float().unsqueeze(-1) * _frequencies(config, places.device)
    if angles.dim() > 2:
        angles = angles.unsqueeze(1)  # for all heads of a row
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries or keys [B, A, S, D] by what `rotations` gave, in its type."""
    cos, sin = rotation
    turned: Tensor = x * cos + x.roll(x.shape[-1] // 2, -1) * sin
    return turned


def _frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per place [D/2]; slow ones stretched as in Llama 3.1, those between slow and fast in proportion."""
    exponents = torch.arange(0, config.head_size, 2, device=device).float() / config.head_size
    frequencies: Tensor = 1.0 / (config.rotary_base**exponents)
    if config.rotary_factor == 1.0:
        return frequencies
    turns = config.rotary_original_length / (2 * math.pi / frequencies)  # in the order of Llama's own program
    share = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0)  # 0 is slow, 1 is fast
    return (1 - share) * frequencies / config.rotary_factor + share * frequencies
