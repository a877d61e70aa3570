"""Settings of gated delta nets."""

import dataclasses
import json
import tomllib
from typing import Any

import pytest

from crosscut.config import ConfigError, LayoutError, ModelConfig, dump_toml, load_run
from crosscut.config.layouts.limits import require_tensor_axis, tensor_limits
from crosscut.config.parts.gated_delta import GatedDeltaConfig
from tests.refusals import refusal

SHAPE = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 256}


def model_of(layers: tuple[str, ...] = ("gated_delta gelu",), **sizes: Any) -> ModelConfig:
    heads = {"key_head_size": 8, "value_head_size": 16, **sizes}
    return ModelConfig(**SHAPE, layers=layers, gated_delta=GatedDeltaConfig(**heads))


def test_heads_of_zero_are_as_wide_as_the_hidden_size_and_twice_as_wide() -> None:
    sizes = model_of().gated_delta
    assert (sizes.num_key_heads, sizes.num_value_heads) == (6, 6)
    assert model_of(num_value_heads=12, num_key_heads=4).gated_delta.num_key_heads == 4
    assert ModelConfig(**SHAPE).gated_delta == GatedDeltaConfig()  # unused, so unchecked


def test_another_hidden_size_keeps_key_heads_in_proportion() -> None:
    smaller = model_of(num_key_heads=4, num_value_heads=12).resized(24).gated_delta
    assert (smaller.num_key_heads, smaller.num_value_heads) == (2, 6)
    assert GatedDeltaConfig().resized(64, 32) == GatedDeltaConfig()


def test_a_run_with_a_section_is_written_and_read_again() -> None:
    model = {**SHAPE, "layers": ["gated_delta"], "gated_delta": {"key_head_size": 8, "value_head_size": 8}}
    model["norm_places"] = ["before", "output"]
    run = load_run({"model": model}, ["model.gated_delta.chunk_size=7"])
    assert run.model.gated_delta.chunk_size == 7
    assert run.model.norm_places == ("before", "output")
    recorded = json.loads(json.dumps(dataclasses.asdict(run.model)))  # as in a checkpoint
    assert ModelConfig(**recorded) == run.model
    assert load_run(tomllib.loads(dump_toml(run))) == run


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width of values": (
        {"value_head_size": 36},
        (
            "`model.gated_delta.value_head_size` must divide twice `model.hidden_size` (96), but is 36. Choose another "
            "size, or set `model.gated_delta.num_value_heads`."
        ),
    ),
    "width of keys": (
        {"key_head_size": 36},
        (
            "`model.gated_delta.key_head_size` must divide `model.hidden_size` (48), but is 36. Choose another size, "
            "or set `model.gated_delta.num_key_heads`."
        ),
    ),
    "epsilon": (
        {"norm_epsilon": -1e-5},
        "`model.gated_delta.norm_epsilon` must be at least 0, but is -1e-05.",
    ),
    "heads": (
        {"num_key_heads": 4},
        (
            "`model.gated_delta.num_key_heads` must divide the 6 value heads of `model.gated_delta`, but is 4. Try 1, "
            "2, 3 or 6."
        ),
    ),
    "taps": ({"conv_size": 0}, "`model.gated_delta.conv_size` must be at least 1, but is 0."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    sizes, told = REFUSED[name]
    assert refusal(ConfigError, model_of, **sizes) == told


def test_a_state_holds_only_earlier_tokens() -> None:
    told = refusal(ConfigError, ModelConfig, **SHAPE, layers=("gated_delta",), attention="bidirectional")
    assert told.startswith('`model.attention` must be "causal" for a model with `gated_delta` in `model.layers`, but')


def test_ranks_divide_value_heads_and_share_key_heads() -> None:
    model = model_of(("gated_delta", "attention"), num_value_heads=12, num_key_heads=2)
    require_tensor_axis(model, 4)
    assert refusal(LayoutError, require_tensor_axis, model, 6) == (
        "`layout.tensor` must divide `model.num_heads` (4), but is 6. Try 1, 2 or 4."
    )
    assert [limit.reason_against(5) for limit in tensor_limits(model_of(("gated_delta",), num_key_heads=2))] == [
        "6 value heads of gated delta nets cannot be divided evenly over 5 tensor ranks",
        "2 key heads of gated delta nets cannot be divided or shared evenly by 5 tensor ranks",
    ]


def test_widths_are_those_of_a_rank() -> None:
    sizes = model_of(num_value_heads=12, num_key_heads=2).gated_delta
    assert list(sizes.widths(1).values()) == [12, 192, 32]
    assert list(sizes.widths(4).values()) == [3, 48, 16]
