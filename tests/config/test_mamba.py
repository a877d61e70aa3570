"""Settings of state-space mixers of the first kind."""

import tomllib
from typing import Any

from crosscut.config import ConfigError, Layout, LayoutError, ModelConfig, dump_toml, load_run
from crosscut.config.layouts.limits import require_tensor_axis, tensor_limits
from crosscut.config.parts.mamba import MambaConfig
from tests.refusals import refusal

SHAPE = {"num_layers": 2, "hidden_size": 36, "num_heads": 4, "vocab_size": 256}


def model_of(layers: tuple[str, ...] = ("mamba gelu",), **sizes: Any) -> ModelConfig:
    return ModelConfig(**SHAPE, layers=layers, mamba=MambaConfig(**sizes))


def test_sizes_of_zero_are_twice_the_hidden_size_and_a_sixteenth_of_it() -> None:
    sizes = model_of().mamba
    assert (sizes.inner_size, sizes.step_rank, sizes.selection_size) == (72, 3, 35)
    assert model_of(inner_size=5, step_rank=7).mamba == MambaConfig(inner_size=5, step_rank=7)
    assert ModelConfig(**SHAPE).mamba == MambaConfig()  # unused, so unchecked


def test_another_hidden_size_keeps_sizes_in_proportion() -> None:
    sizes = model_of().resized(72).mamba
    assert (sizes.inner_size, sizes.step_rank) == (144, 6)


def test_a_run_with_a_section_is_written_and_read_again() -> None:
    run = load_run(
        {"model": {**SHAPE, "layers": ["mamba"], "mamba": {"vector_norms": True}}}, ["model.mamba.step_rank=7"]
    )
    assert (run.model.mamba.vector_norms, run.model.mamba.step_rank) == (True, 7)
    assert load_run(tomllib.loads(dump_toml(run))) == run


def test_a_state_of_nothing_is_refused() -> None:
    assert refusal(ConfigError, model_of, state_size=0) == "`model.mamba.state_size` must be at least 1, but is 0."
    told = refusal(ConfigError, ModelConfig, **SHAPE, layers=("mamba",), attention="bidirectional")
    assert told.startswith('`model.attention` must be "causal" for a model with `mamba` in `model.layers`, but is')


def test_ranks_divide_channels() -> None:
    model = model_of(("mamba",))
    require_tensor_axis(model, 8)
    assert refusal(LayoutError, require_tensor_axis, model, 5).startswith(
        "`layout.tensor` must divide `model.mamba.inner_size` (72), but is 5. Try"
    )
    (limit,) = tensor_limits(model)
    assert limit.reason_against(5) == "72 state-space channels cannot be divided evenly over 5 tensor ranks"


def test_context_ranks_divide_the_channels_of_a_tensor_rank() -> None:
    table = {"model": {**SHAPE, "layers": ["mamba"], "max_sequence_length": 48}, "training": {"sequence_length": 48}}
    load_run(table, [], change_layout=lambda _: Layout(context=4))
    assert refusal(LayoutError, load_run, table, [], change_layout=lambda _: Layout(tensor=8, context=2)) == (
        "`layout.context` must divide the 9 state-space channels of a tensor rank (`model.mamba.inner_size` 72 / "
        "`layout.tensor` 8), but is 2. Each context rank reads whole sequences with a part of them. Try 1, 3 or 9."
    )
