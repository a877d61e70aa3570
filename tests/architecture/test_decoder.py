"""The description of whole models: layers that differ, names, roles, and what follows for one rank."""

from collections import Counter
from dataclasses import replace

import pytest

from crosscut.architecture import Cut, Parameter, Role, Target, describe, flat, kept, lower, run_again
from crosscut.architecture.messages import backward_messages, forward_messages, products_at
from crosscut.architecture.parameters import ONES, ZEROS, Law, Start
from crosscut.config import PRESETS, Layout, ModelConfig
from crosscut.config.training import InitialSpread

MIXED = ModelConfig(
    num_layers=5,
    hidden_size=64,
    num_heads=4,
    vocab_size=300,
    layers=("attention swiglu", "attention swiglu", "attention gelu"),
    biases="none",
)


def names(model: ModelConfig) -> list[str]:
    return [parameter.name for parameter in describe(model).parameters()]


def test_a_pattern_repeats_until_every_layer_has_a_kind() -> None:
    assert [MIXED.parts_of(i)[1][1] for i in range(5)] == ["swiglu", "swiglu", "gelu", "swiglu", "swiglu"]
    assert list(describe(MIXED).kinds.values()) == [4, 1]
    gated = {name.split(".")[1] for name in names(MIXED) if "gate" in name}
    assert gated == {"0", "1", "3", "4"}


def test_equal_layers_are_one_object() -> None:
    decoder = describe(ModelConfig(**PRESETS["gpt2-small"]))
    assert len(set(map(id, decoder.layers))) == 1
    assert decoder.recomputed(5).total() == 3
    assert decoder.recomputed(0).total() == 0


def test_only_matrices_and_embeddings_decay() -> None:
    decoder = describe(ModelConfig(**PRESETS["gpt2-small"]))
    decayed = {p.name for p in decoder.parameters() if p.role.decays}
    assert decayed == {p.name for p in decoder.parameters() if len(p.shape) > 1}


def test_the_role_of_a_parameter_decides_the_group_whose_learning_rate_it_has() -> None:
    for tied in (True, False):
        decoder = describe(replace(MIXED, qk_norm=True, tied=tied, biases="all"))
        groups: dict[str, set[str]] = {}
        for parameter in decoder.parameters():
            groups.setdefault(parameter.role.group, set()).add(parameter.name.rpartition(".")[0].split(".")[-1])
        assert groups.pop("embedding") == {"tokens", "positions"}
        assert groups.pop("head", set()) == (set() if tied else {"output"})
        matrices = {"query", "key_value", "output", "gate", "up", "expand", "contract"}
        assert groups.pop("matrix") == matrices
        norms = {"attention_norm", "mlp_norm", "final_norm", "query_norm", "key_norm"}
        assert groups == {"scalar": matrices | norms}  # matrices have biases


def test_matrices_before_a_residual_sum_start_smaller_by_the_root_of_the_sums() -> None:
    starts = {role: Parameter(name="", shape=(6, 4), role=role).initial(36) for role in Role}
    assert starts.pop(Role.BEFORE_RESIDUAL) == Start(Law.NORMAL, 0.02 / 6)
    assert {starts.pop(role) for role in (Role.NORM, Role.BIAS, Role.DYNAMICS, Role.BALANCE, Role.UP)} == {ZEROS}
    assert starts.pop(Role.DOWN) == starts.pop(Role.TAPS) == Start(Law.NORMAL, 12**-0.5)
    assert set(starts.values()) == {Start(Law.NORMAL, 0.02)}


def test_spread_by_fan_in_is_of_the_inputs_of_all_ranks() -> None:
    for tied, of_embedding in ((True, 0.25), (False, 1.0)):
        model = replace(MIXED, hidden_size=16, head_size=0, num_heads=2, num_kv_heads=2, mlp_size=64, tied=tied)
        starts = {p.name: p.initial(4, InitialSpread.FAN_IN) for p in describe(model).parameters()}
        assert starts["final_norm.weight"] == ONES
        found = {name: start.first for name, start in starts.items()}
        assert found["tokens.weight"] == found["positions.weight"] == of_embedding
        assert found.get("output.weight", 0.25) == 0.25
        assert found["blocks.0.attention.qkv.key_value.weight"] == 0.25
        assert found["blocks.0.attention.output.weight"] == 0.25 / 2
        assert found["blocks.1.mlp.contract.weight"] == 0.125 / 2
    roles = {p.name: p.role for p in describe(MIXED).parameters()}
    ends = [name for name, role in roles.items() if role is Role.BEFORE_RESIDUAL]
    assert len(ends) == 2 * MIXED.num_layers
    assert {name.split(".", 2)[2] for name in ends} == {"attention.output.weight", "mlp.contract.weight"}


def test_ranks_that_are_more_than_the_heads_of_keys_hold_them_whole() -> None:
    model = ModelConfig(num_layers=1, hidden_size=64, num_heads=8, num_kv_heads=2, vocab_size=300)
    (key_value,) = [p for p in describe(model).parameters() if p.name.endswith("key_value.weight")]
    assert key_value.cut is Cut.HEADS
    assert [key_value.dim_cut(tensor) for tensor in (1, 2, 4)] == [0, 0, None]
    assert key_value.on(Target.of(Layout(tensor=4))).has_partial_gradient
    assert not key_value.on(Target.of(Layout(tensor=2))).has_partial_gradient


def test_the_vocabulary_is_padded_for_the_ranks() -> None:
    tokens = describe(MIXED).embedding.tokens
    assert tokens.shape == (300, 64)
    assert [tokens.on(Target.of(Layout(tensor=tensor))).shape for tensor in (1, 2, 4)] == [
        (384, 64),
        (256, 64),
        (128, 64),
    ]


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("split", [False, True])
def test_a_layer_meets_at_two_points_each_way(kind: str, split: bool) -> None:
    model = ModelConfig(num_layers=1, hidden_size=64, num_heads=4, vocab_size=300, layers=(f"attention {kind}",))
    target = replace(Target.of(Layout(tensor=2, sequence_parallel=split)), sequences=1, length=8)
    steps = list(flat(lower(describe(model).layers[0], target)))
    forward = Counter(sent.message.operation.value for sent in forward_messages(steps))
    backward = Counter(sent.message.operation.value for sent in backward_messages(steps))
    if split:
        assert forward == {"all_gather": 2, "reduce_scatter": 2}
        assert backward == {"all_gather": 4, "reduce_scatter": 2}  # each region gathers its input once more
    else:
        assert forward == {"all_reduce": 2}
        assert backward == {"all_reduce": 2}


def test_recomputation_repeats_all_but_what_nothing_kept_depends_on() -> None:
    layer, target = (
        describe(ModelConfig(**PRESETS["gpt2-small"])).layers[0],
        replace(Target.of(Layout()), sequences=2, length=16),
    )
    steps = list(flat(lower(layer, target)))
    eager = run_again(layer, target, everything=False)
    left_out = [step.gives[0].name for step in steps if step not in eager]
    assert left_out == ["mlp contract", "mlp contract, left", "mlp contract, left, dropped", "after mlp"]
    assert run_again(layer, target, everything=True) == tuple(steps)


def test_recomputation_repeats_the_sums_if_norms_come_after_them() -> None:
    model = ModelConfig(**PRESETS["gpt2-small"], norm_place="after")
    layer, target = describe(model).layers[0], replace(Target.of(Layout(tensor=2)), sequences=2, length=16)
    steps = tuple(flat(lower(layer, target)))
    assert run_again(layer, target, everything=False) == steps
    assert [step.gives[0].name for step in steps[-2:]] == ["after mlp", "mlp_norm out"]


def test_norms_after_the_sums_keep_the_sums() -> None:
    shape = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "vocab_size": 300, "dropout": 0.0}
    target = replace(Target.of(Layout()), sequences=1, length=8)
    stream, of_norm = 8 * 64 * 4, 8 * 2 * 4
    for place, inputs in (("before", 1), ("after", 2)):  # after: the layer's input, and the input of the norm
        layer = describe(ModelConfig(**shape, norm_place=place)).layers[0]
        attention, mlp = kept(layer, target, "none")
        assert (attention.inputs, mlp.inputs) == (inputs * stream, stream)
        assert attention.norms + mlp.norms == (2 if place == "before" else 1) * stream + 2 * of_norm
    names = [p.name for p in describe(ModelConfig(**shape, norm_place="after", token_types=2)).root_parameters()]
    assert names == [f"{name}.weight" for name in ("tokens", "positions", "token_types", "embedding_norm")] + [
        "embedding_norm.bias"
    ]


def test_a_value_that_several_products_keep_counts_once() -> None:
    gated = ModelConfig(
        num_layers=1, hidden_size=64, num_heads=4, vocab_size=300, layers=("attention swiglu",), dropout=0.0
    )
    target = replace(Target.of(Layout()), sequences=1, length=8, compute_bytes=2)
    _, mlp = kept(describe(gated).layers[0], target, "none")
    tokens, of_norm = 8, 2 * 4  # mean and deviation in two bytes each on the CPU
    assert mlp.inputs == tokens * 64 * 2
    assert mlp.norms == tokens * (64 * 2 + of_norm // 2)
    assert mlp.inside == 3 * tokens * 256 * 2


def test_products_stand_at_their_end_of_the_region() -> None:
    target = replace(Target.of(Layout(tensor=2)), sequences=1, length=8)
    found = products_at(describe(MIXED).layers[0], target)
    assert {name: len(products) for name, products in found.items()} == {
        "attention input": 2,
        "attention output": 1,
        "mlp input": 2,
        "mlp output": 1,
    }
