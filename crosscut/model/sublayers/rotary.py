"""Rotary position embeddings (RoPE): pairs of a head's elements are rotated in proportion to the token's position.

    angle(position, i) = position * base^(-2 i / R)          i = 0 ... R/2 - 1, the pair of elements i and i + R/2

Positions then enter the dot product of a query and a key only through their distance (Su et al. 2021, arXiv 2104.09864,
section 3.2). Elements are paired as in Llama's published weights, and angles are computed in float32 in every
precision, as in Llama. For sequences longer than those seen in training, `model.rotary_scaling` lowers the frequencies.

Shapes: B batch, A heads, S sequence, D elements of a head, R of which are rotated.
"""

import math
from types import MappingProxyType

import torch
from torch import Tensor

from crosscut.config import ModelConfig
from crosscut.config.parts.rotary import RotaryScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles. All layers share them, but layers with a sliding window may have their own."""

_LLAMA3_TURNS, _YARN_TURNS = (1.0, 4.0), (1.0, 32.0)
"""Limits of low and of high frequencies, in turns per `rotary_original_length` positions. A frequency below the first
limit counts as low, and a frequency above the second limit counts as high."""


def rotations(places: Tensor, config: ModelConfig, dtype: torch.dtype, *, length: int = 0) -> Rotation:
    """Compute cosines and sines for tokens at the positions `places`. For `places` [S], both results are [S, R]; for
    [B, S], both are [B, 1, S, R]. `length` is the number of tokens in each sequence, without padding; only dynamic
    scaling uses it.

    The sines for the first element of each pair are negated, because `rotate` expects negated sines. With YaRN, both
    results are multiplied by the attention factor.
    """
    angles = places.float().unsqueeze(-1) * frequencies(config, places.device, length=length)
    if angles.dim() > 2:
        angles = angles.unsqueeze(1)  # for all heads of a row
    factor = attention_factor(config)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys [B, A, S, D] by the cosines and sines [S, R] that `rotations` returns. Only the first R
    elements of a head are rotated.
    """
    cos, sin = rotation
    if (rotated := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], rotation), x[..., rotated:]), -1)
    turned: Tensor = x * cos + x.roll(x.shape[-1] // 2, -1) * sin
    return turned


def frequencies(config: ModelConfig, device: torch.device, *, length: int = 0) -> Tensor:
    """Return the frequencies in radians per position [R/2] for sequences of `length` tokens. Operations run in the same
    order as in the published code, so that the results agree bit for bit.
    """
    size = config.rotary_size
    exponents = torch.arange(0, size, 2, device=device).float() / size
    if config.rotary_factor == 1.0:
        return _unscaled(config.rotary_base, exponents)
    return _SCALINGS[config.rotary_scaling](config, exponents, length)


def attention_factor(config: ModelConfig) -> float:
    """Return the factor by which rotated queries and rotated keys are multiplied: 1 unless the scaling is YaRN."""
    if config.rotary_factor == 1.0 or config.rotary_scaling is not RotaryScaling.YARN:
        return 1.0
    return config.rotary_attention_factor or 0.1 * math.log(config.rotary_factor) + 1.0


def _unscaled(base: float | Tensor, exponents: Tensor) -> Tensor:
    plain: Tensor = 1.0 / (base**exponents)
    return plain


def _linear(config: ModelConfig, exponents: Tensor, _: int) -> Tensor:
    """Divide all frequencies by `rotary_factor`. Dividing all positions by this factor has the same effect (Chen et al.
    2023, arXiv 2306.15595).
    """
    return _unscaled(config.rotary_base, exponents) / config.rotary_factor


def _llama3(config: ModelConfig, exponents: Tensor, _: int) -> Tensor:
    """Divide low frequencies by `rotary_factor`, keep high ones, and interpolate between them, as in Llama 3.1."""
    plain = _unscaled(config.rotary_base, exponents)
    turns = config.rotary_original_length / (2 * math.pi / plain)
    low, high = _LLAMA3_TURNS
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0 for low frequencies, 1 for high ones
    return (1 - share) * plain / config.rotary_factor + share * plain


def _dynamic(config: ModelConfig, exponents: Tensor, length: int) -> Tensor:
    """Raise the base so that the lowest frequency falls with the length of the sequence. Sequences of at most
    `rotary_original_length` tokens keep the base. The rule is known as dynamic NTK.
    """
    original, size, factor = config.rotary_original_length, config.rotary_size, config.rotary_factor
    if length <= original:
        return _unscaled(config.rotary_base, exponents)
    longer = factor * torch.tensor(float(length), device=exponents.device) / original
    return _unscaled(config.rotary_base * (longer - (factor - 1)) ** (size / (size - 2)), exponents)


def _yarn(config: ModelConfig, exponents: Tensor, _: int) -> Tensor:
    """Divide low frequencies by `rotary_factor`, keep high ones, and interpolate linearly in the index of the pair
    between the two limits (Peng et al. 2023, arXiv 2309.00071, section 3.2).
    """
    size, base = config.rotary_size, config.rotary_base
    low_turns, high_turns = _YARN_TURNS

    def pair_with(turns: float) -> float:
        return size * math.log(config.rotary_original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair_with(high_turns)), 0), min(math.ceil(pair_with(low_turns)), size - 1)
    width = last - first if last != first else 0.001
    pairs = torch.arange(size // 2, device=exponents.device, dtype=torch.float32)
    share = 1 - ((pairs - first) / width).clamp(0, 1)  # 0 for low frequencies, 1 for high ones
    wavelengths = base**exponents
    return 1.0 / (config.rotary_factor * wavelengths) * (1 - share) + 1.0 / wavelengths * share


_SCALINGS = MappingProxyType(
    {
        RotaryScaling.LLAMA3: _llama3,
        RotaryScaling.LINEAR: _linear,
        RotaryScaling.DYNAMIC: _dynamic,
        RotaryScaling.YARN: _yarn,
    }
)
