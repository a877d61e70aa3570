"""Settings of state-space mixers."""

import dataclasses
import json
import tomllib
from typing import Any

import pytest

from crosscut.config import ConfigError, Layout, LayoutError, ModelConfig, dump_toml, load_run
from crosscut.config.layouts.limits import require_tensor_axis, tensor_limits
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.config.published.folders import reason_against_export
from tests.refusals import refusal

SHAPE = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 256}


def model_of(layers: tuple[str, ...] = ("mamba2 gelu",), **sizes: Any) -> ModelConfig:
    return ModelConfig(**SHAPE, layers=layers, mamba2=Mamba2Config(**{"head_size": 8, "state_size": 4, **sizes}))


def test_sizes_of_zero_are_twice_the_hidden_size_and_the_groups_of_the_vectors() -> None:
    sizes = model_of(num_groups=3).mamba2
    assert (sizes.num_heads, sizes.inner_size, sizes.norm_groups) == (12, 96, 3)
    assert model_of(num_heads=5).mamba2.inner_size == 40
    assert ModelConfig(**SHAPE).mamba2 == Mamba2Config()  # unused, so unchecked


def test_only_a_model_with_attention_needs_a_number_of_heads() -> None:
    model = {"num_layers": 2, "hidden_size": 48, "vocab_size": 256, "layers": ["mamba2"], "mamba2": {"head_size": 8}}
    run = load_run({"model": model})
    assert (run.model.num_heads, run.model.size, run.model.family) == (0, "2 layers of mamba2; hidden 48", "mamba2")
    assert load_run(tomllib.loads(dump_toml(run))) == run
    assert run.model.resized(96).mamba2.num_heads == 24
    assert reason_against_export(run.model).startswith("`model.layers` must be ['attention gelu'] in a")
    ModelConfig(**{**SHAPE, "hidden_size": 64, "num_heads": 5}, layers=("mamba2",))  # unused, so unchecked
    told = refusal(ConfigError, load_run, {"model": {**model, "layers": ["mamba2", "attention"]}})
    assert told.startswith("`model.num_heads` must be given, but is missing. Give `model.num_layers`,")
    without = {name: size for name, size in SHAPE.items() if name != "num_heads"}
    assert refusal(ConfigError, ModelConfig, **without) == "`model.num_heads` must be at least 1, but is 0."


def test_another_hidden_size_keeps_heads_in_proportion() -> None:
    assert model_of(num_groups=2).resized(24).mamba2.num_heads == 6
    assert model_of(num_groups=4).resized(12).mamba2.num_heads == 4
    assert model_of(num_groups=2, norm_groups=3).resized(40).mamba2.num_heads == 6


def test_a_run_with_a_section_is_written_and_read_again() -> None:
    model = {**SHAPE, "layers": ["mamba2"], "mamba2": {"head_size": 8, "most_time_step": 0.5}}
    run = load_run({"model": model}, ["model.mamba2.state_size=7"])
    assert (run.model.mamba2.state_size, run.model.mamba2.most_time_step) == (7, 0.5)
    assert load_run(tomllib.loads(dump_toml(run))) == run
    assert ModelConfig(**json.loads(json.dumps(dataclasses.asdict(run.model)))) == run.model  # as in a checkpoint


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"head_size": 36},
        (
            "`model.mamba2.head_size` must divide twice `model.hidden_size` (96), but is 36. Choose another size, or "
            "set `model.mamba2.num_heads`."
        ),
    ),
    "groups": (
        {"num_groups": 5},
        "`model.mamba2.num_groups` must divide the 12 heads of `model.mamba2`, but is 5. Try 1, 2, 3, 4, 6 or 12.",
    ),
    "groups of the norm": (
        {"norm_groups": 7},
        "`model.mamba2.norm_groups` must divide the 12 heads of `model.mamba2`, but is 7. Try 1, 2, 3, 4, 6 or 12.",
    ),
    "limits": (
        {"least_time_step": 0.5, "most_time_step": 0.5},
        (
            "`model.mamba2.most_time_step` must be above `model.mamba2.least_time_step` (0.5), but is 0.5. Set 0 for "
            "no maximum."
        ),
    ),
    "a state of nothing": ({"state_size": 0}, "`model.mamba2.state_size` must be at least 1, but is 0."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    sizes, told = REFUSED[name]
    assert refusal(ConfigError, model_of, **sizes) == told


def test_a_state_holds_only_earlier_tokens() -> None:
    told = refusal(ConfigError, ModelConfig, **SHAPE, layers=("mamba2",), attention="bidirectional")
    assert told.startswith('`model.attention` must be "causal" for a model with `mamba2` in `model.layers`, but is')


def test_ranks_divide_heads_and_share_groups() -> None:
    model = model_of(("mamba2", "attention"), num_groups=2, norm_groups=1)
    require_tensor_axis(model, 4)
    assert refusal(LayoutError, require_tensor_axis, model, 3) == (
        "`layout.tensor` must divide `model.num_heads` (4), but is 3. Try 1, 2 or 4."
    )
    assert refusal(LayoutError, require_tensor_axis, model_of(num_groups=4), 6) == (
        "`layout.tensor` must divide `model.mamba2.num_groups` (4) or be a multiple of it, but is 6. Try 1, 2, 4 or 12."
    )
    limits = tensor_limits(model_of(("mamba2",), num_groups=4, norm_groups=2))
    assert [limit.reason_against(5) for limit in limits] == [
        "12 state-space heads cannot be divided evenly over 5 tensor ranks",
        "4 groups of state-space heads cannot be divided or shared evenly by 5 tensor ranks",
        "2 groups of the gated norm cannot be divided or shared evenly by 5 tensor ranks",
    ]


def test_context_ranks_divide_the_heads_of_a_tensor_rank() -> None:
    model = {**SHAPE, "layers": ["mamba2"], "mamba2": {"head_size": 8}, "max_sequence_length": 64}
    table = {"model": model, "training": {"sequence_length": 64}}
    of_attention = Layout(context=3, context_attention="all_to_all")  # no layer has the four heads of attention
    load_run(table, ["training.sequence_length=48"], change_layout=lambda _: of_attention)
    load_run(table, [], change_layout=lambda _: Layout(context=4))
    assert refusal(LayoutError, load_run, table, [], change_layout=lambda _: Layout(tensor=4, context=2)) == (
        "`layout.context` must divide the 3 state-space heads of a tensor rank (`model.mamba2.num_heads` 12 / "
        "`layout.tensor` 4), but is 2. Each context rank reads whole sequences with a part of them. Try 1 or 3."
    )


MISTAKES = {
    "no section": (3, "`model.mamba2` must be a section, but is 3. "),
    "a key": ({"stat_size": 3}, "`model.mamba2.stat_size` must be a key of `model.mamba2`, but there is no such key. "),
    "a value": ({"state_size": "x"}, "`model.mamba2.state_size` must be a whole number, but is 'x'."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_section_with_mistakes_is_refused_by_the_key(name: str) -> None:
    section, told = MISTAKES[name]
    model = {**SHAPE, "hidden_size": 64, "layers": ["mamba2"], "mamba2": section}
    assert refusal(ConfigError, load_run, {"model": model}).startswith(told)


def test_a_model_without_attention_exchanges_heads_and_has_no_settings_of_attention() -> None:
    training = {"sequence_length": 1 << 17, "batch_size": 4}
    model = {"num_layers": 2, "hidden_size": 48, "vocab_size": 256, "layers": ["mamba2"], "mamba2": {"head_size": 8}}
    run = load_run(
        {"model": model, "layout": {"context": 4}, "training": training | {"recompute": "selective"}},
        ["model.max_sequence_length=131072"],
    )
    assert run.context_attention.way == "all_to_all"
    assert not run.repeats_scores
    told = refusal(ConfigError, load_run, {"model": {**model, "qk_norm": True}})
    assert told.startswith("`model.qk_norm` must be false for a model whose layers have no `attention`, but is true.")
