import dataclasses

import pytest

from crosscut.architecture import Target, describe, layer_parameters
from crosscut.config import PRESETS, ConfigError, Layout, ModelConfig
from crosscut.config.published.presets import DEMO_PRESET, LAPTOP_PRESETS
from crosscut.planner import count_parameters, parameters_per_rank, replicated_parameters
from tests.refusals import refusal

EXACT = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "codellama-34b": 33_743_970_304,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "nemotron-h-8b": 8_100_852_736,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_419_200,  # with 58 x 256 biases, which are buffers in transformers
    "bert-base": 110_106_428,  # BertForPreTraining of transformers
    "bert-large": 336_226_108,
}
"""Parameters of released models."""
ROUNDED = {
    "megatron-1.2b": 1.2,
    "megatron-2.5b": 2.5,
    "megatron-4.2b": 4.2,
    "megatron-8.3b": 8.3,  # the paper's Table 1
    "megatron-355m": 0.355,
    "megatron-8.3b-24-heads": 8.3,  # its Table 4
    "megatron-bert-336m": 0.336,
    "megatron-bert-1.3b": 1.3,
    "megatron-bert-3.9b": 3.9,  # arXiv 1909.08053v4, Table 4
    "turing-nlg-17b": 17,
    "gpt3-175b": 175,
    "mt-nlg-530b": 530,  # as their names say
}
"""Billions of parameters, to as many digits as are published."""


def preset(name: str) -> ModelConfig:
    return ModelConfig(**PRESETS[name])


@pytest.mark.parametrize(("name", "parameters"), EXACT.items())
def test_released_models_have_their_parameters_exactly(name: str, parameters: int) -> None:
    assert count_parameters(preset(name)) == parameters


@pytest.mark.parametrize(("name", "billions"), ROUNDED.items())
def test_models_of_papers_have_the_published_parameters(name: str, billions: float) -> None:
    digits = 0 if billions >= 10 else 1 if billions >= 1 else 3
    assert round(count_parameters(preset(name)) / 1e9, digits) == billions


def test_every_preset_of_a_published_model_is_held_against_a_figure() -> None:
    assert {*EXACT, *ROUNDED} == set(PRESETS) - {*LAPTOP_PRESETS, DEMO_PRESET}


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters spelled out one by one, to hold the formulas against."""
    H = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (model.vocab_size, H),
        "positions": (model.max_sequence_length, H),
        "final norm weight": (H,),
        "final norm bias": (H,),
    }
    for layer in range(model.num_layers):
        for norm in ("attention", "mlp"):
            shapes |= {f"{layer} {norm} norm weight": (H,), f"{layer} {norm} norm bias": (H,)}
        matrices = {
            "query": (H, H),
            "key value": (2 * H, H),
            "output": (H, H),
            "up": (4 * H, H),
            "down": (H, 4 * H),
        }
        for name, (rows, columns) in matrices.items():
            shapes |= {f"{layer} {name} weight": (rows, columns), f"{layer} {name} bias": (rows,)}
    return shapes


def num_elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


SMALL = ModelConfig(num_layers=3, hidden_size=24, num_heads=4, vocab_size=1000, max_sequence_length=40)


def test_count_is_the_sum_over_all_parameters() -> None:
    assert count_parameters(SMALL) == sum(num_elements(shape) for shape in parameter_shapes(SMALL).values())


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_rank_holds_its_part_of_cut_parameters_and_all_of_whole_ones(tensor: int) -> None:
    padded = dataclasses.replace(SMALL, vocab_size={1: 1024, 2: 1024, 4: 1024}[tensor])
    expected = 0
    for name, shape in parameter_shapes(padded).items():
        whole = name == "positions" or "norm" in name or name.endswith(("output bias", "down bias"))
        expected += num_elements(shape) // (1 if whole else tensor)
    assert parameters_per_rank(SMALL, Layout(tensor=tensor)) == expected


def test_a_rank_holds_the_padded_vocabulary() -> None:
    without = dataclasses.replace(preset("megatron-8.3b"), vocab_size=51_200)
    layout = Layout(tensor=8)
    assert parameters_per_rank(preset("megatron-8.3b"), layout) == parameters_per_rank(without, layout)


def test_data_ranks_do_not_change_what_a_rank_holds() -> None:
    assert parameters_per_rank(SMALL, Layout(tensor=2, data=8)) == parameters_per_rank(SMALL, Layout(tensor=2))


def test_all_ranks_together_hold_the_replicated_parameters_once_each() -> None:
    aligned = dataclasses.replace(SMALL, vocab_size=1024)
    together = 4 * parameters_per_rank(aligned, Layout(tensor=4))
    assert together == count_parameters(aligned) + 3 * replicated_parameters(aligned, Layout(tensor=4))


def test_unknown_vocabulary_is_named() -> None:
    assert refusal(ConfigError, count_parameters, preset("laptop-tiny")) == (
        "`model.vocab_size` must be at least 1 for a forecast, but is 0, which leaves the size to the tokenizer. "
        "Set it to the number of tokens of the tokenizer."
    )


GROUPED = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=40,
    vocab_size=1000,
    positions="rotary",
    norm="rms",
    layers=("attention swiglu",),
    biases="qkv",
    qk_norm=True,
    tied=False,
)


@pytest.mark.parametrize(("tensor", "key_value_rows"), [(1, 24), (2, 12), (4, 24)])  # four ranks share two heads
def test_a_rank_holds_whole_the_heads_that_ranks_share(tensor: int, key_value_rows: int) -> None:
    H = 24
    key_value = key_value_rows * H + key_value_rows
    layer = (H * H + H) // tensor + key_value + H * H // tensor + 3 * H * 40 // tensor + 2 * H + 2 * 6
    padded = 1024 // tensor
    assert parameters_per_rank(GROUPED, Layout(tensor=tensor)) == 2 * layer + 2 * padded * H + H


def test_shared_heads_and_head_norms_have_gradients_in_parts() -> None:
    def partial(tensor: int) -> list[int]:
        held = layer_parameters(describe(GROUPED).layers[0], Target.of(Layout(tensor=tensor)))
        return sorted(parameter.size for parameter in held if parameter.has_partial_gradient)

    assert partial(4) == [6, 6, 24, 24 * 24]
    assert partial(1) == []
