"""The gated delta net against that of transformers, whose casts to float32 are replaced by casts to float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.config.parts.gated_delta import GatedDeltaConfig as Sizes
from tests.model.mixers import compared, mixer_of, saved_and_planned
from tests.ranks import RankPool

HIDDEN, VALUE, KEY = 24, 8, 5


def our_weights(theirs: nn.Module, keys: int, heads: int) -> dict[str, Tensor]:
    """Weights of transformers' mixer by the names of ours. The rows of its projections are ordered by key head: query,
    key, the values and the gates of the key head's value heads; and their strengths and step sizes.
    """
    shared = heads // keys
    by_key = theirs.in_proj_qkvz.weight.unflatten(0, (keys, -1))
    query_key, value, gate = by_key.split([2 * KEY, shared * VALUE, shared * VALUE], 1)
    strength, step = theirs.in_proj_ba.weight.unflatten(0, (keys, 2, shared)).unbind(1)
    named = {"query_key": query_key, "value": value, "gate": gate, "strength": strength, "step": step}
    found = {f"inputs.{name}.weight": weight.flatten(0, 1) for name, weight in named.items()}
    of_keys, of_values = theirs.conv1d.weight.squeeze(1).split([2 * keys * KEY, heads * VALUE])
    by_head = of_keys.unflatten(0, (2, keys, KEY)).transpose(0, 1).flatten(0, 2)
    found |= {"query_key_convolution.weight": by_head, "convolution.weight": of_values}
    dynamics = {"log_rate": theirs.A_log, "step_bias": theirs.dt_bias}
    return {**found, **dynamics, "norm.weight": theirs.norm.weight, "output.weight": theirs.out_proj.weight}


def against_transformers(keys: int, heads: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(1)
    published = Qwen3NextConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, linear_num_key_heads=keys, linear_num_value_heads=heads,
        linear_key_head_dim=KEY, linear_value_head_dim=VALUE, linear_conv_kernel_dim=4, rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(published, 0).double()
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    sizes = Sizes(num_key_heads=keys, num_value_heads=heads, key_head_size=KEY, value_head_size=VALUE)
    ours = mixer_of({"hidden_size": HIDDEN, "layers": ("gated_delta",), "gated_delta": sizes})
    return compared(ours, theirs, our_weights(theirs, keys, heads), length=length)


@pytest.mark.parametrize(("keys", "heads", "length"), [(2, 6, 37), (3, 3, 70)])
def test_the_mixer_is_that_of_transformers(ranks: RankPool, keys: int, heads: int, length: int) -> None:
    ours, reference = ranks.run(1, against_transformers, keys, heads, length)[0]
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


SAVED: dict[str, Any] = {
    "layers": ("gated_delta",),
    "gated_delta": Sizes(num_key_heads=2, num_value_heads=4, key_head_size=6, value_head_size=8, chunk_size=16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [16, 37])
def test_the_planner_counts_saved_values_to_the_byte(ranks: RankPool, length: int, dtype: torch.dtype) -> None:
    saved, planned = ranks.run(1, saved_and_planned, SAVED, length, dtype)[0]
    assert saved == planned
