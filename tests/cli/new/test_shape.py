"""Shapes of models for a number of parameters."""

import pytest

from crosscut.cli.new.shape import PROPORTION, nearest_shape
from crosscut.config import PRESETS
from crosscut.config.published.presets import GPT2_VOCAB_SIZE
from crosscut.config.recipes import RECIPES
from crosscut.planner import count_parameters

MODERN = {**RECIPES["modern"]["model"], "max_sequence_length": 256}
GPT2 = {"vocab_size": GPT2_VOCAB_SIZE, "max_sequence_length": 1024}


def test_the_shape_of_125_million_parameters_is_that_of_gpt2_small() -> None:
    found = nearest_shape(125e6, GPT2)
    sizes = ("num_layers", "hidden_size", "num_heads")
    assert {size: getattr(found, size) for size in sizes} == {size: PRESETS["gpt2-small"][size] for size in sizes}


@pytest.mark.parametrize("number", [3e6, 1e7, 5e7, 1e8, 3.55e8, 1.3e9, 8.3e9, 7e10, 1.75e11])
def test_a_model_has_about_the_asked_parameters_and_the_proportions_of_gpt2(number: float) -> None:
    found = nearest_shape(number, {**GPT2, "vocab_size": 8192 if number < 1e8 else GPT2_VOCAB_SIZE})
    assert count_parameters(found) == pytest.approx(number, rel=0.06)
    assert found.hidden_size / found.num_layers == pytest.approx(PROPORTION, rel=0.35)
    assert found.head_size in (32, 64, 128)


@pytest.mark.parametrize(("number", "vocab_size"), [(1e6, 6096), (1.3e6, 8192), (5e6, 32_768), (1.1e7, 32_768)])
def test_a_small_model_is_near_the_asked_parameters_although_its_embedding_is_large(
    number: float, vocab_size: int
) -> None:
    found = nearest_shape(number, {**MODERN, "vocab_size": vocab_size})
    assert count_parameters(found) == pytest.approx(number, rel=0.1)
    assert found.hidden_size >= 4 * found.num_layers


def test_no_model_is_far_deeper_than_gpt2() -> None:
    """Layers of width 64 could make up for any number of parameters."""
    found = nearest_shape(9e6, {**MODERN, "vocab_size": GPT2_VOCAB_SIZE})
    assert (found.hidden_size, found.num_layers) == (64, 16)


@pytest.mark.parametrize("number", [2e5, 1e6, 2e6, 3e6, 5e6, 1e7, 1.5e7, 2e7, 3e7, 1e8, 1e9, 7e10])
def test_tensor_ranks_can_share_the_heads_of_every_model(number: float) -> None:
    found = nearest_shape(number, {**MODERN, "vocab_size": 2048})
    assert found.num_heads >= 4
    assert found.num_heads % 2 == 0
    assert found.head_size % 16 == 0
