"""The shape of a decoder, and what it leaves to others."""

from typing import Any

import pytest

from crosscut.config import ConfigError, LayoutError, ModelConfig
from crosscut.config.model import require_tensor_axis
from tests.refusals import refusal

LLAMA = {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "biases": "none", "tied": False}


def test_sizes_of_zero_are_those_of_gpt2() -> None:
    model = ModelConfig(num_layers=1, hidden_size=48, num_heads=6)
    assert (model.head_size, model.num_kv_heads, model.mlp_size) == (8, 6, 192)
    assert (model.query_size, model.key_value_size, model.family) == (48, 96, "GPT-2")


def test_heads_may_have_a_width_of_their_own() -> None:
    model = ModelConfig(num_layers=1, hidden_size=50, num_heads=4, num_kv_heads=2, head_size=16, **LLAMA)
    assert (model.query_size, model.key_value_size, model.family) == (64, 64, "Llama")


def test_another_hidden_size_keeps_the_structure() -> None:
    model = ModelConfig(num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2, mlp_size=172, **LLAMA)
    small = model.resized(32)
    assert (small.head_size, small.num_kv_heads, small.mlp_size) == (8, 2, 84)
    wide = ModelConfig(num_layers=1, hidden_size=64, num_heads=4, head_size=32, **LLAMA).resized(48)
    assert (wide.head_size, wide.mlp_size) == (32, 192)


def test_norms_after_the_sums_have_one_of_the_embedding() -> None:
    model = ModelConfig(num_layers=1, hidden_size=48, num_heads=6, norm_place="after", attention="bidirectional")
    assert (model.norms_embedding, model.is_causal, model.family) == (True, False, "BERT")
    gpt2 = ModelConfig(num_layers=1, hidden_size=48, num_heads=6)
    assert (gpt2.norms_embedding, gpt2.is_causal) == (False, True)
    for name, wrong in {"norm_place": "'before' or 'after'", "attention": "'causal' or 'bidirectional'"}.items():
        with pytest.raises(ConfigError, match=rf"^`model.{name}` must be {wrong}, but is 'between'\.$"):
            ModelConfig(num_layers=1, hidden_size=48, num_heads=6, **{name: "between"})
    with pytest.raises(ConfigError, match=r"^`model.token_types` must be at least 0, but is -1\."):
        ModelConfig(num_layers=1, hidden_size=48, num_heads=6, token_types=-1)


def test_masked_tokens_are_predicted_from_both_sides() -> None:
    shape = {"num_layers": 1, "hidden_size": 48, "num_heads": 6}
    model = ModelConfig(**shape, attention="bidirectional", head="masked_tokens", sentence_order=True)
    assert model.predicts_masked
    assert refusal(ConfigError, ModelConfig, **shape, head="masked_tokens") == (
        '`model.attention` must be "bidirectional" for a model that predicts masked tokens, but is "causal". Set '
        'model.attention="bidirectional", or model.head="next_token".'
    )
    with pytest.raises(
        ConfigError, match=r"^`model.lora_rank` must be 0 for a model that predicts masked tokens, but is 4"
    ):
        ModelConfig(**shape, attention="bidirectional", head="masked_tokens", lora_rank=4)
    assert refusal(ConfigError, ModelConfig, **shape, sentence_order=True) == (
        "`model.sentence_order` must be false for a model that predicts the next token, but is true. Set "
        'model.head="masked_tokens", or remove `model.sentence_order`.'
    )


def test_a_task_has_a_head_without_a_vocabulary() -> None:
    shape = {"num_layers": 1, "hidden_size": 48, "num_heads": 6}
    decoder = ModelConfig(**shape, tied=False, logit_softcap=15.0).with_head("classes", num_classes=3)
    assert decoder == ModelConfig(**shape, head="classes", num_classes=3)
    assert (decoder.solves_task, decoder.has_pooler) == (True, False)
    encoder = ModelConfig(**shape, attention="bidirectional", head="masked_tokens", sentence_order=True)
    assert encoder.with_head("choice").has_pooler
    assert not encoder.with_head("spans").has_pooler
    messages = {
        ("choice", "tied", False): '`model.tied` must be true for a model with `model.head` = "choice", but is false. '
        "This model has no output projection. Set model.tied=true.",
        ("spans", "logit_softcap", 15.0): '`model.logit_softcap` must be 0.0 for a model with `model.head` = "spans", '
        "but is 15.0. This model has no output projection. Set model.logit_softcap=0.0.",
        ("spans", "lora_rank", 4): '`model.lora_rank` must be 0 for a model with `model.head` = "spans", but is 4. '
        "Adapters are for models that predict the next token. Remove `model.lora_rank`.",
        ("spans", "sentence_order", True): "`model.sentence_order` must be false for a model with `model.head` = "
        '"spans", but is true. Set model.head="masked_tokens", or remove `model.sentence_order`.',
        ("classes", "num_classes", 1): "`model.num_classes` must be at least 2 for a model with `model.head` = "
        '"classes", but is 1. Set `model.num_classes` to the number of labels.',
        ("spans", "num_classes", 2): '`model.num_classes` must be 0 for a model with `model.head` = "spans", but is 2. '
        'Remove `model.num_classes`, or set model.head="classes".',
    }
    for (head, name, value), message in messages.items():
        assert refusal(ConfigError, ModelConfig, **shape, head=head, **{name: value}) == message
    with pytest.raises(ConfigError, match=r"^`model.head` must be .*'choice', but is 'class'"):
        encoder.with_head("class")


def test_a_pooler_is_cut_over_the_ranks() -> None:
    shape = {"num_layers": 1, "hidden_size": 50, "num_heads": 4, "head_size": 16, "mlp_size": 64}
    encoder = ModelConfig(**shape, attention="bidirectional")
    require_tensor_axis(encoder, 4)
    assert refusal(LayoutError, require_tensor_axis, encoder.with_head("classes", num_classes=2), 4) == (
        "`layout.tensor` must divide `model.hidden_size` (50) for a model with a pooler, but is 4. Try 1 or 2."
    )


def test_rotations_turn_pairs() -> None:
    assert refusal(ConfigError, ModelConfig, num_layers=1, hidden_size=9, num_heads=3, positions="rotary") == (
        "`model.head_size` must be even, but is 3. Rotary positions rotate pairs of elements. Choose an even head size."
    )


ROTARY = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "positions": "rotary"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"positions": "learned", "rotary_factor": 4.0},
            (
                "`model.rotary_factor` must be 1 for a model with learned positions, but is 4.0. Remove "
                '`model.rotary_factor`, or set model.positions="rotary".'
            ),
        ),
        (
            {"rotary_scaling": "yarn"},
            (
                '`model.rotary_factor` must be above 1 with `model.rotary_scaling` = "yarn", but is 1. Set '
                "`model.rotary_factor` to the longest sequence divided by `model.rotary_original_length`, or remove "
                "`model.rotary_scaling`."
            ),
        ),
        (
            {"rotary_scaling": "linear", "rotary_factor": 4.0, "rotary_attention_factor": 1.5},
            (
                '`model.rotary_attention_factor` must be 0 with `model.rotary_scaling` = "linear", but is 1.5. Only '
                "YaRN uses this factor. Remove `model.rotary_attention_factor`."
            ),
        ),
        (
            {"rotary_scaling": "dynamic", "rotary_factor": 4.0, "head_size": 2},
            (
                '`model.head_size` must be above 2 with `model.rotary_scaling` = "dynamic", but is 2. The scaled base '
                'has the exponent `model.head_size` / (`model.head_size` - 2). Set model.rotary_scaling="linear".'
            ),
        ),
        (
            {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_base": 1.0},
            (
                '`model.rotary_base` must be above 1 with `model.rotary_scaling` = "yarn", but is 1.0. Set '
                "model.rotary_base=10000, or the base of the published model."
            ),
        ),
    ],
)
def test_scaled_rotations_that_cannot_be_are_named(settings: dict[str, Any], message: str) -> None:
    assert refusal(ConfigError, ModelConfig, **{**ROTARY, **settings}) == message


def test_a_cache_is_as_long_as_rotations_stay() -> None:
    longer = {"max_sequence_length": 4096, "rotary_factor": 4.0, "rotary_original_length": 1024}
    assert ModelConfig(**ROTARY, **longer, rotary_scaling="yarn").generation_length == 4096
    assert ModelConfig(**ROTARY, **longer, rotary_scaling="dynamic").generation_length == 1024


def test_a_pattern_of_mlps_is_a_list() -> None:
    shape = {"num_layers": 3, "hidden_size": 64, "num_heads": 4}
    model = ModelConfig(**shape, mlp_pattern=["swiglu", "gelu"])
    assert [model.mlp_of(i) for i in range(3)] == ["swiglu", "gelu", "swiglu"]
    with pytest.raises(ConfigError, match=r"^`model.mlp_pattern` must be a list of strings, but is 'gelu'\.$"):
        ModelConfig(**shape, mlp_pattern="gelu")
    with pytest.raises(ConfigError, match=r"^`model.mlp_pattern` must be 'gelu', .* or 'geglu', but is 'relu'\.$"):
        ModelConfig(**shape, mlp_pattern=("gelu", "relu"))
