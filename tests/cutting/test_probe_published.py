"""Plans that are found for models of transformers."""

import time
from typing import Any

import pytest
import torch

from crosscut.cutting import Plan, plan_cuts
from crosscut.cutting.probe import find_plan

pytestmark = pytest.mark.slow  # imports transformers, and repeats what the quick tests ask of plain modules


def plan_of(model: str, **sizes: Any) -> Plan:
    """Plan of a tiny model, whose inputs are ids or images."""
    import transformers

    kind = getattr(transformers, model)
    torch.manual_seed(0)
    module = kind._from_config(kind.config_class(**sizes), attn_implementation="eager")
    images = {"pixel_values": torch.randn(2, 3, 16, 16)}
    ids = {"input_ids": torch.arange(4, 20).view(2, 8)}
    return find_plan(module, images if "image_size" in sizes else ids)


def styles(plan: Plan, prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): str(rule.style) for name, rule in plan.rules.items() if name.startswith(prefix)}


def test_integers_of_gpt2_are_found() -> None:
    plan = plan_of("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=4, n_positions=16, vocab_size=48)

    assert plan.rules["transformer.h.*.attn.c_attn"].parts == (16, 16, 16)
    assert plan.integers == {"transformer.h.*.attn": {"split_size": (8, 4)}}
    assert str(plan.rules["lm_head"].style) == "colwise_gather_output"


def test_integers_of_a_config_are_found() -> None:
    plan = plan_of(
        "Phi3ForCausalLM", vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0,
    )  # fmt: skip

    assert plan.integers == {
        "model.layers.*.self_attn": {"config.num_attention_heads": (2, 1), "num_key_value_heads": (2, 1)}
    }


def test_norms_of_heads_and_shared_heads_of_qwen3_are_found() -> None:
    plan = plan_of(
        "Qwen3ForCausalLM", vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip

    assert plan.integers == {"model.layers.*.self_attn": {"num_key_value_groups": (2, 1)}}
    assert plan.rules["model.layers.*.self_attn.k_proj"].units == 2
    found = styles(plan, "model.layers.*.self_attn.")
    assert found["q_norm"] == found["k_norm"] == "replicated_with_grad_allreduce"


def test_tables_of_swin_are_found_for_stages_of_different_heads() -> None:
    plan = plan_of(
        "SwinForImageClassification", image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[4, 8],
        window_size=4,
    )  # fmt: skip

    (name,) = plan.tables
    assert name.endswith("relative_position_bias_table")
    assert plan.tables[name].dimension == 1


def test_a_norm_over_all_heads_of_olmo2_stops_the_pair() -> None:
    plan = plan_of(
        "Olmo2ForCausalLM", vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip

    assert {*styles(plan, "model.layers.*.self_attn.").values()} == {"colwise_gather_output"}
    assert plan.rules["model.layers.*.self_attn.q_proj"].reason
    assert styles(plan, "model.layers.*.mlp.")["down_proj"] == "rowwise"


def llama_1b() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config), {"input_ids": torch.arange(16).view(2, 8)}, None


@pytest.mark.alone
def test_a_plan_for_a_billion_parameters_takes_less_than_two_minutes() -> None:
    start = time.perf_counter()

    plan = plan_cuts(llama_1b, prove=False)

    assert time.perf_counter() - start < 120
    assert styles(plan, "model.layers.*.mlp.")["down_proj"] == "rowwise"
