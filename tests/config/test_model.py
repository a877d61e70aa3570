"""The shape of a decoder, and what it leaves to others."""

from dataclasses import replace

import pytest

from crosscut.config import ConfigError, LayoutError, ModelConfig
from crosscut.config.layouts.limits import require_tensor_axis
from tests.refusals import refusal

LLAMA = {"positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none", "tied": False}


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


def test_masked_tokens_are_predicted_from_both_sides() -> None:
    shape = {"num_layers": 1, "hidden_size": 48, "num_heads": 6}
    model = ModelConfig(**shape, attention="bidirectional", head="masked_tokens", sentence_order=True)
    assert model.predicts_masked


def test_a_task_has_a_head_without_a_vocabulary() -> None:
    shape = {"num_layers": 1, "hidden_size": 48, "num_heads": 6}
    decoder = ModelConfig(**shape, tied=False, logit_softcap=15.0).with_head("classes", num_classes=3)
    assert decoder == ModelConfig(**shape, head="classes", num_classes=3)
    assert (decoder.solves_task, decoder.has_pooler) == (True, False)
    encoder = ModelConfig(**shape, attention="bidirectional", head="masked_tokens", sentence_order=True)
    assert encoder.with_head("choice").has_pooler
    assert not encoder.with_head("spans").has_pooler
    with pytest.raises(ConfigError, match=r"^`model.head` must be .*'choice', but is 'class'"):
        encoder.with_head("class")


def test_a_pooler_is_cut_over_the_ranks() -> None:
    shape = {"num_layers": 1, "hidden_size": 50, "num_heads": 4, "head_size": 16, "mlp_size": 64}
    encoder = ModelConfig(**shape, attention="bidirectional")
    require_tensor_axis(encoder, 4)
    assert refusal(LayoutError, require_tensor_axis, encoder.with_head("classes", num_classes=2), 4) == (
        "`layout.tensor` must divide `model.hidden_size` (50) for a model with a pooler, but is 4. Try 1 or 2."
    )


ROTARY = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "positions": "rotary"}


def test_a_cache_is_as_long_as_rotations_stay() -> None:
    longer = {"max_sequence_length": 4096, "rotary_factor": 4.0, "rotary_original_length": 1024}
    assert ModelConfig(**ROTARY, **longer, rotary_scaling="yarn").generation_length == 4096
    assert ModelConfig(**ROTARY, **longer, rotary_scaling="dynamic").generation_length == 1024


SHAPE = {"num_layers": 3, "hidden_size": 64, "num_heads": 4}


def test_layers_are_repeated() -> None:
    model = ModelConfig(**SHAPE, layers=["attention swiglu", " attention  gelu attention", "gelu"])
    assert [model.parts_of(i) for i in range(3)] == [
        (("attention", "attention"), ("mlp", "swiglu")),
        (("attention", "attention"), ("mlp", "gelu"), ("attention_2", "attention")),
        (("mlp", "gelu"),),
    ]
    assert replace(model, num_layers=7).layer(4) == "attention gelu attention"
    assert replace(model, num_layers=1).different_layers == ("attention swiglu",)
    assert ModelConfig(**SHAPE, layers=["gelu", "relu2"] * 2) == ModelConfig(**SHAPE, layers=("gelu", "relu2"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("gelu", r"^`model\.layers` must be a list of strings, but is 'gelu'\."),
        ([1], r"^`model\.layers` must be a list of strings, but is \[1\]\."),
        ([], r"^`model\.layers` must list at least one layer, but is empty\. Write for example layers ="),
        (["attention", ""], r"must list layers of 1 to 8 parts each \(.*geglu\), but has the layer ''\."),
        (["attention relu"], r"^`model\.layers` must list layers .*, but has the layer 'attention relu'\. Write for"),
        (["gelu " * 9], "must list layers of 1 to 8 parts each"),
    ],
    ids=str,
)
def test_layers_of_other_parts_are_refused(layers: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**SHAPE, layers=layers)
