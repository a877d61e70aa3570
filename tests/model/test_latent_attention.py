"""Latent attention against that of transformers, whose casts to float32 are replaced by casts to float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.architecture import Target, describe, kept
from crosscut.config import Layout, ModelConfig
from crosscut.config.parts.latent_attention import LatentAttentionConfig as Sizes
from crosscut.model import GPT
from crosscut.model.shared import Shared
from crosscut.model.sublayers.rotary import rotations
from crosscut.parallel import RandomStreams, make_mesh
from tests.ranks import RankPool

HIDDEN, HEADS, LENGTH = 24, 3, 21
WIDTHS: dict[str, int] = {"key_value_rank": 10, "nope_size": 6, "rope_size": 8, "value_size": 5}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.7,
    "rope_theta": 100.0,
}  # fmt: skip
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}


def in_halves(rows: Tensor) -> Tensor:
    """Rows that alternate between first and second elements of pairs, with all first elements before all others."""
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


def our_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """Weights of transformers' attention by the names of ours."""
    latent, key = theirs.kv_a_proj_with_mqa.weight.split([WIDTHS["key_value_rank"], WIDTHS["rope_size"]])
    of_query = theirs.q_proj if theirs.q_lora_rank is None else theirs.q_b_proj
    plain, rotary = of_query.weight.unflatten(0, (HEADS, -1)).split([WIDTHS["nope_size"], WIDTHS["rope_size"]], 1)
    found = {
        "down.latent.weight": latent,
        "down.key.weight": in_halves(key),
        "latent_norm.weight": theirs.kv_a_layernorm.weight,
        "query.weight": torch.cat((plain, in_halves(rotary)), 1).flatten(0, 1),
        "key_value.weight": theirs.kv_b_proj.weight,
        "output.weight": theirs.o_proj.weight,
    }
    if theirs.q_lora_rank is not None:
        found |= {"down.query.weight": theirs.q_a_proj.weight, "query_norm.weight": theirs.q_a_layernorm.weight}
    return found


def outputs_and_gradients(mixer: Any, x: Tensor) -> list[Tensor]:
    y = mixer(x)
    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), x)
    return [y, grad]


def published(version: int, rank: int, rope: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Attention of DeepSeek-V2 or -V3 with random weights, and its rotation of `LENGTH` positions."""
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    made, code = ((DeepseekV2Config, v2), (DeepseekV3Config, v3))[version - 2]
    shape: Any = {
        "kv_lora_rank": WIDTHS["key_value_rank"], "qk_nope_head_dim": WIDTHS["nope_size"],
        "qk_rope_head_dim": WIDTHS["rope_size"], "v_head_dim": WIDTHS["value_size"], "q_lora_rank": rank or None,
    }  # fmt: skip
    shape |= {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = made(max_position_embeddings=32, rope_parameters=rope, **shape)
    config._attn_implementation = "eager"
    theirs = getattr(code, f"DeepseekV{version}Attention")(config, 0).double()
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    rotation = v3.DeepseekV3RotaryEmbedding(config)
    cos, sin = rotation(torch.zeros(1, dtype=torch.float64), torch.arange(LENGTH).unsqueeze(0))
    if version == 3:
        return theirs, (cos, sin)
    return theirs, torch.complex(
        *(each[..., : WIDTHS["rope_size"] // 2] for each in (cos, sin))
    )  # `torch.polar` rounds otherwise


def against_transformers(version: int, rank: int, rope: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    theirs, rotation = published(version, rank, rope)
    scaling: dict[str, Any] = {}
    if rope["rope_type"] == "yarn":
        scaling = {
            "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 8,
            "rotary_attention_factor": theirs_factor(rope),
        }  # fmt: skip
    sizes = Sizes(query_rank=rank, mscale_all_dim=rope.get("mscale_all_dim", 0.0), **WIDTHS)
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=8, layers=("latent_attention",), biases="none",
        latent_attention=sizes, positions="rotary", rotary_base=rope["rope_theta"], dropout=0.0, **scaling,
    )  # fmt: skip
    mesh = make_mesh(Layout(), torch.device("cpu"))
    ours = GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=torch.float64).blocks[0].attention
    weights = our_weights(theirs)
    for name, parameter in ours.named_parameters():
        parameter.data.to_local().copy_(weights.pop(name).detach())
    assert not weights
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    later = torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.float64).triu(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        how: Any = {"position_embeddings": rotation, "attention_mask": later[None, None]}
        reference = outputs_and_gradients(lambda x: theirs(x, **how)[0], x)
    shared = Shared(rotations(torch.arange(LENGTH), model, torch.float64))
    return outputs_and_gradients(lambda x: ours(x, shared), x), reference


def theirs_factor(rope: dict[str, Any]) -> float:
    """Factor of rotated queries and keys in DeepSeek's files."""
    from math import log

    upper, lower = (0.1 * rope[key] * log(rope["factor"]) + 1.0 for key in ("mscale", "mscale_all_dim"))
    return float(upper / lower)


@pytest.mark.parametrize(("version", "rank", "rope"), [(3, 7, YARN), (2, 0, PLAIN), (2, 7, YARN)])
def test_the_mixer_is_that_of_transformers(ranks: RankPool, version: int, rank: int, rope: dict[str, Any]) -> None:
    ours, reference = ranks.run(1, against_transformers, version, rank, rope)[0]
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def saved_and_planned(value_size: int, rank: int, dropout: float, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a layer saves for its backward pass, and those of the planner."""
    sizes = Sizes(query_rank=rank, **{**WIDTHS, "value_size": value_size})
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=8, layers=("latent_attention",), dropout=dropout,
        latent_attention=sizes, positions="rotary", max_sequence_length=64,
    )  # fmt: skip
    mesh = make_mesh(Layout(), torch.device("cpu"))
    gpt = GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=dtype).train()
    rotation = rotations(torch.arange(LENGTH), model, dtype)
    own = {tensor.to_local().untyped_storage().data_ptr() for tensor in gpt.parameters()}
    own |= {tensor.untyped_storage().data_ptr() for tensor in rotation}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, _ = gpt.blocks[0](torch.randn(3, LENGTH, HIDDEN, dtype=dtype, requires_grad=True), Shared(rotation))
    assert y.requires_grad
    own_bytes = {"compute_bytes": dtype.itemsize, "sums_bytes": dtype.itemsize}
    target = replace(Target.of(Layout()), sequences=3, length=LENGTH, **own_bytes)
    (planned,) = kept(describe(model).layers[0], target, "none")
    return sum(saved.values()), planned.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("value_size", "rank"), [(5, 7), (14, 0), (17, 7)])
def test_the_planner_counts_saved_values_to_the_byte(
    ranks: RankPool, value_size: int, rank: int, dtype: torch.dtype
) -> None:
    saved, planned = ranks.run(1, saved_and_planned, value_size, rank, 0.0, dtype)[0]
    assert saved == planned
