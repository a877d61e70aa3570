"""Larger models for more ranks."""

from dataclasses import replace
from math import lcm

from crosscut.config.layouts.limits import tensor_limits
from crosscut.config.model import ModelConfig


def grow(model: ModelConfig, tensor: int) -> ModelConfig:
    """Return a larger model for `tensor` ranks, so that each rank holds about as many parameters as `model` has.

    Both the width and the depth grow, as in Figure 6, and the head size stays the same. The number of heads grows with
    the cube root of the number of ranks, rounded so that the ranks divide the heads. The number of layers grows by the
    remaining factor. From the 16 heads of the paper's 1.2B model, this gives 20, 24 and 32 heads as in the paper. In a
    model without attention, the smallest number that tensor ranks must divide takes the place of the attention heads.
    """
    if tensor == 1:
        return model
    limits = (limit.number for limit in tensor_limits(model) if not limit.may_share)
    before = model.num_heads if model.attends else min(limits)
    group = model.num_heads // model.num_kv_heads if model.attends else 1
    unit = lcm(tensor, group)
    heads = max(1, round(before * tensor ** (1 / 3) / unit)) * unit
    hidden = model.hidden_size * heads // before
    multiple = heads if model.attends else tensor
    return replace(
        model,
        num_layers=max(1, round(model.num_layers * tensor * (before / heads) ** 2)),
        hidden_size=hidden,
        **model.resized_sections(hidden),
        mlp_size=model.mlp_size * heads // before // multiple * multiple,
        num_heads=heads if model.attends else 0,
        num_kv_heads=heads // group if model.attends else 0,
    )
