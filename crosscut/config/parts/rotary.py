"""Positions of a model's tokens, and the rules that rotary positions must meet."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crosscut.config.checks import Choice, require_value, shown
from crosscut.config.errors import ConfigError
from crosscut.config.parts.kinds import ATTENTIONS, Mixer

if TYPE_CHECKING:
    from crosscut.config.model import ModelConfig


class Positions(Choice):
    """Encoding of a token's position."""

    LEARNED = "learned"
    ROTARY = "rotary"
    NONE = "none"


class RotaryScaling(Choice):
    """Rule by which rotary frequencies are reduced, so that a model can read longer sequences."""

    LLAMA3 = "llama3"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"


def check_rotary(model: "ModelConfig") -> None:
    """Raise `ConfigError` for settings that do not suit the model's positions, and for sizes that cannot be rotated."""
    scaling, factor = model.rotary_scaling, model.rotary_factor
    _check_positions(model)
    if factor == 1 and scaling is not RotaryScaling.LLAMA3:
        raise ConfigError(
            f'`model.rotary_factor` must be above 1 with `model.rotary_scaling` = "{scaling}", but is 1. Set '
            "`model.rotary_factor` to the longest sequence divided by `model.rotary_original_length`, or remove "
            "`model.rotary_scaling`."
        )
    if scaling is not RotaryScaling.YARN:
        remedy = "Only YaRN uses this factor. Remove `model.rotary_attention_factor`."
        model.require_value("rotary_attention_factor", 0, f'with `model.rotary_scaling` = "{scaling}"', remedy)
    if scaling is RotaryScaling.DYNAMIC and model.rotary_size == 2:
        name = next(iter(rotated_sizes(model)))
        raise ConfigError(
            f'`model.{name}` must be above 2 with `model.rotary_scaling` = "dynamic", but is 2. The scaled base '
            f'has the exponent `model.{name}` / (`model.{name}` - 2). Set model.rotary_scaling="linear".'
        )
    if scaling is RotaryScaling.YARN and model.rotary_base <= 1:
        raise ConfigError(
            '`model.rotary_base` must be above 1 with `model.rotary_scaling` = "yarn", but is '
            f"{shown(model.rotary_base)}. Set model.rotary_base=10000, or the base of the published model."
        )


def _check_positions(model: "ModelConfig") -> None:
    is_rotary = model.positions is Positions.ROTARY
    if not 0 < model.rotary_fraction <= 1:
        raise ConfigError(
            f"`model.rotary_fraction` must be above 0 and at most 1, but is {shown(model.rotary_fraction)}. Set 1 "
            "to rotate whole heads, or choose the part `nope_attention` in `model.layers` to rotate nothing."
        )
    if is_rotary:
        _check_rotated(model)
    else:
        for name in ("rotary_factor", "rotary_fraction"):
            remedy = f'Remove `model.{name}`, or set model.positions="rotary".'
            model.require_value(name, 1, f'with `model.positions` = "{model.positions}"', remedy)
        if model.windows:
            name, remedy = "model.sliding_attention.rotary_base", 'Remove the base, or set model.positions="rotary".'
            base, when = model.sliding_attention.rotary_base, f'with `model.positions` = "{model.positions}"'
            require_value(name, base, 0, when, remedy)
    if Mixer.NOPE_ATTENTION in model.kinds and not is_rotary:
        raise ConfigError(
            '`model.positions` must be "rotary" for a model with `nope_attention` in `model.layers`, but is '
            f'"{model.positions}", which is the same in every layer. Set model.positions="rotary", or write '
            "`attention`."
        )


def _check_rotated(model: "ModelConfig") -> None:
    first, of_all = next(iter(rotated_sizes(model)), ""), model.rotary_size
    for name, size in rotated_sizes(model).items():
        if size % 2 and (name != "head_size" or model.rotary_fraction == 1):
            raise ConfigError(
                f"`model.{name}` must be even, but is {size}. Rotary positions rotate pairs of elements. Choose an "
                "even head size."
            )
        if size % 2 or not size:
            raise ConfigError(
                f"`model.rotary_fraction` must be an even number of elements of a head (`model.head_size` is "
                f"{model.head_size}), but is {shown(model.rotary_fraction)}. Rotary positions rotate pairs of "
                "elements. Try 0.5."
            )
        if size != of_all:
            must = f"`model.{first}` ({of_all})"
            if model.rotary_fraction != 1:
                must = f"the {of_all} elements that `model.rotary_fraction` leaves of `model.{first}`"
            raise ConfigError(
                f"`model.{name}` must be {must} in a model with both kinds of attention, but is {size}. All layers "
                'share the rotations of one size. Change one of the two, or set model.positions="learned".'
            )


def rotated_sizes(model: "ModelConfig") -> Mapping[str, int]:
    """Numbers of elements of a head that rotary positions rotate, by the name of their setting. Kinds without a
    section of their own rotate the fraction `rotary_fraction` of `head_size`. Empty if nothing is rotated.
    """
    names = {f"{of}.{name}": size for of, section in model.sections.items() for name, size in section.rotated.items()}
    if not any(kind in ATTENTIONS and kind is not Mixer.NOPE_ATTENTION for kind in model.kinds):
        return names
    return {"head_size": int(model.head_size * model.rotary_fraction), **names}
