"""The shape of a decoder, and what it leaves to others."""

from dataclasses import replace
from typing import Any

import pytest

from crosscut.config import ConfigError, LayoutError, ModelConfig
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.parts.mamba2 import Mamba2Config
from tests.refusals import refusal

SMALL_STATES = Mamba2Config(head_size=8)
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
        (["attention", ""], r"must list layers of 1 to 8 parts each \(.*experts\), but has the layer ''\."),
        (["attention relu"], r"^`model\.layers` must list layers .*, but has the layer 'attention relu'\. Write for"),
        (["mamba mlp"], r'for example layers = \["mamba swiglu"\]\.$'),
        (["gated_delta_net, swiglu"], r'for example layers = \["gated_delta swiglu"\]\.$'),
        (["gelu " * 9], "must list layers of 1 to 8 parts each"),
    ],
    ids=str,
)
def test_layers_of_other_parts_are_refused(layers: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**SHAPE, layers=layers)


@pytest.mark.parametrize(
    ("number", "layers", "pattern"),
    [
        (1, ("mamba2",), "1 layer of mamba2"),
        (24, ("attention swiglu",), "24 layers of attention and swiglu"),
        (6, ("mamba2", "relu2", "attention", "relu2"), "6 layers: 2 x mamba2, 3 x relu2, 1 x attention"),
        (3, ("mamba2 swiglu", "attention"), "3 layers: 2 x mamba2, 2 x swiglu, 1 x attention"),
    ],
)
def test_the_pattern_counts_the_parts_of_all_layers(number: int, layers: tuple[str, ...], pattern: str) -> None:
    assert ModelConfig(num_layers=number, hidden_size=32, num_heads=4, layers=layers, mamba2=SMALL_STATES).pattern == (
        pattern
    )


def test_a_norm_of_all_heads_is_an_rms_norm_of_queries_and_keys() -> None:
    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "qk_norm_over": "all_heads"}
    assert refusal(ConfigError, ModelConfig, **shape) == (
        '`model.qk_norm` must be true with `model.qk_norm_over` = "all_heads", but is false. Set model.qk_norm=true.'
    )
    assert refusal(ConfigError, ModelConfig, **shape, qk_norm=True, qk_norm_kind="layer") == (
        "`model.qk_norm_kind` must be 'rms' with `model.qk_norm_over` = \"all_heads\", but is 'layer'. Set "
        'model.qk_norm_kind="rms".'
    )


def test_places_of_norms_are_the_shortest_list_that_gives_the_same() -> None:
    def places(*given: str, **others: Any) -> tuple[str, tuple[str, ...]]:
        model = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, norm_places=given, **others)
        return str(model.norm_place), model.norm_places

    assert places("before", "output", "before", "output") == ("before", ("before", "output"))
    assert places("output", "output") == ("output", ())
    assert places("before") == places() == ("before", ())
    model = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, norm_places=("output", "before"))
    assert [model.norm_place_of(index) for index in range(3)] == ["output", "before", "output"]


def test_norms_after_residual_sums_are_in_all_layers_or_in_none() -> None:
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4}
    for given in (["before", "after"], "output"):
        assert refusal(ConfigError, ModelConfig, **shape, norm_places=given) == (
            f"`model.norm_places` must be a list of 'before' or 'output', but is {given!r}. Norms after the residual "
            'sums are the same in all layers: set model.norm_place="after".'
        )
    assert refusal(ConfigError, ModelConfig, **shape, norm_places=("before", "output"), norm_place="output") == (
        "`model.norm_place` must be 'before' with `model.norm_places`, but is 'output'. Remove one of the two."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "layer"}, "`model.norm` must be 'rms' {}, but is 'layer'. Remove `model.norm_offset`."),
        ({"norm_affine": False}, "`model.norm_affine` must be true {}, but is false. Remove `model.norm_offset`."),
        (
            {"qk_norm": True, "qk_norm_kind": "layer"},
            "`model.qk_norm_kind` must be 'rms' {}, but is 'layer'. Set model.qk_norm_kind=\"rms\".",
        ),
        (
            {"qk_norm": True, "qk_norm_over": "all_heads"},
            "`model.qk_norm_over` must be 'head' {}, but is 'all_heads'. Set model.qk_norm_over=\"head\".",
        ),
    ],
    ids=str,
)
def test_only_rms_norms_have_offsets(changes: dict[str, Any], message: str) -> None:
    model = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "norm": "rms", "norm_offset": True, **changes}
    assert refusal(ConfigError, ModelConfig, **model) == message.format("for a model with `model.norm_offset`")


ROTARY: dict[str, Any] = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "positions": "rotary"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rotary_fraction": 0.0},
            (
                "`model.rotary_fraction` must be above 0 and at most 1, but is 0.0. Set 1 to rotate whole heads, or "
                "choose the part `nope_attention` in `model.layers` to rotate nothing."
            ),
        ),
        (
            {"rotary_fraction": 0.25},
            (
                "`model.rotary_fraction` must be an even number of elements of a head (`model.head_size` is 12), but "
                "is 0.25. Rotary positions rotate pairs of elements. Try 0.5."
            ),
        ),
        (
            {"rotary_fraction": 0.5, "positions": "learned"},
            (
                '`model.rotary_fraction` must be 1 with `model.positions` = "learned", but is 0.5. Remove '
                '`model.rotary_fraction`, or set model.positions="rotary".'
            ),
        ),
        (
            {"layers": ("nope_attention gelu",), "positions": "learned"},
            (
                '`model.positions` must be "rotary" for a model with `nope_attention` in `model.layers`, but is '
                '"learned", which is the same in every layer. Set model.positions="rotary", or write `attention`.'
            ),
        ),
        (
            {"layers": ("sliding_attention gelu",), "attention": "bidirectional"},
            (
                '`model.attention` must be "causal" for a model with `sliding_attention` in `model.layers`, but is '
                '"bidirectional": a window holds a token and the tokens before it. Set model.attention="causal", or '
                "choose other layers."
            ),
        ),
        (
            {
                "layers": ("sliding_attention gelu",),
                "sliding_attention": {"rotary_base": 100.0},
                "positions": "learned",
            },
            (
                '`model.sliding_attention.rotary_base` must be 0 with `model.positions` = "learned", but is 100.0. '
                'Remove the base, or set model.positions="rotary".'
            ),
        ),
        ({"sliding_attention": {"window": 0}}, "`model.sliding_attention.window` must be at least 1, but is 0."),
        (
            {"sliding_attention": {"rotary_base": -1.0}},
            "`model.sliding_attention.rotary_base` must be at least 0 and finite, but is -1.0.",
        ),
    ],
)
def test_kinds_of_attention_are_refused_with_a_reason(changes: dict[str, Any], message: str) -> None:
    assert refusal(ConfigError, ModelConfig, **{**ROTARY, **changes}) == message


def test_layers_with_a_window_may_have_frequencies_of_their_own() -> None:
    scaling = {"rotary_factor": 8.0, "rotary_scaling": "yarn", "rotary_attention_factor": 1.5}
    plain = ModelConfig(**ROTARY, **scaling)
    assert plain.in_windows == plain
    own = ModelConfig(**ROTARY, **scaling, sliding_attention={"rotary_base": 100.0, "rotary_scaled": False})
    assert (own.in_windows.rotary_base, own.in_windows.rotary_factor) == (100.0, 1.0)
    assert (own.rotary_base, own.rotary_factor) == (10_000.0, 8.0)


def test_kinds_of_attention_have_the_limits_of_attention() -> None:
    model = ModelConfig(**ROTARY, layers=("nope_attention gelu", "sliding_attention gelu"))
    assert refusal(LayoutError, require_tensor_axis, model, 3) == (
        "`layout.tensor` must divide `model.num_heads` (4), but is 3. Try 1, 2 or 4."
    )


def test_windows_of_a_shorter_sequence_still_hide_tokens() -> None:
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4}
    model = ModelConfig(**shape, layers=("sliding_attention gelu", "attention gelu"), positions="rotary")
    assert (model.windows, model.with_windows_in(16).windows) == ((4096,), (8,))
    plain = ModelConfig(**shape)
    assert (plain.windows, plain.with_windows_in(16)) == ((), plain)
