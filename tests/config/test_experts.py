"""Settings of mixtures of experts, and the messages about wrong ones."""

from typing import Any

import pytest

from crosscut.config import ConfigError, LayoutError, ModelConfig, load_run
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.parts.experts import ExpertsConfig
from crosscut.config.recipes import num_parameters
from crosscut.planner import count_parameters
from tests.refusals import refusal

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "layers": ("attention experts",)}


def model_of(**settings: Any) -> ModelConfig:
    return ModelConfig(**SHAPE, vocab_size=300, experts=ExpertsConfig(**settings))


def test_the_experts_of_a_token_are_as_wide_as_an_mlp() -> None:
    assert model_of(per_token=2).experts.size == 64
    assert model_of(per_token=2, size=10).experts.size == 10


def test_a_file_sets_the_section() -> None:
    run = load_run({"model": {**SHAPE, "experts": {"number": 6}}}, ["model.experts.per_token=3"])
    assert (run.model.experts.number, run.model.experts.per_token) == (6, 3)


def test_a_mixture_takes_another_hidden_size() -> None:
    model = model_of(size=24, shared_size=8).resized(64)
    assert (model.experts.size, model.experts.shared_size) == (48, 16)


def test_the_matrices_of_all_experts_count() -> None:
    model = model_of(number=4, size=10, shared_size=6)
    plain = ModelConfig(**{**SHAPE, "layers": ("attention",)}, vocab_size=300)
    of_experts = 2 * 32 * (3 * (4 * 10 + 6) + 4)
    assert num_parameters(model) - num_parameters(plain) == of_experts
    norms = 2 * 2 * 32
    assert count_parameters(model) - count_parameters(plain) == of_experts + norms


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "too many experts of a token": (
        {"number": 4, "per_token": 5},
        ("`model.experts.per_token` must be at most `model.experts.number` (4), but is 5. Choose fewer experts per "
        "token, or have more experts."),
    ),
    "too many experts for the groups": (
        {"number": 8, "groups": 4, "groups_per_token": 1, "per_token": 3},
        ("`model.experts.per_token` must be at most the 2 experts of `model.experts.groups_per_token` groups, but is "
        "3. Choose fewer experts per token, or have more experts."),
    ),
    "uneven groups": (
        {"number": 8, "groups": 3},
        "`model.experts.groups` must divide `model.experts.number` (8), but is 3. Try 1, 2, 4 or 8.",
    ),
    "too many groups": (
        {"groups": 2, "groups_per_token": 3},
        "`model.experts.groups_per_token` must be at most `model.experts.groups` (2), but is 3.",
    ),
    "a score of more experts than a group has": (
        {"number": 4, "groups": 4, "groups_per_token": 4},
        "`model.experts.group_top` must be at most the 1 experts of a group, but is 2.",
    ),
    "no expert": ({"number": 0}, "`model.experts.number` must be at least 1, but is 0."),
    "experts of experts": (
        {"mlp": "experts"}, '`model.experts.mlp` must be gelu, gelu_exact, relu2, swiglu or geglu, but is "experts".'
    ),
    "a gate of nothing": (
        {"shared_gate": True},
        ("`model.experts.shared_size` must be at least 1 with `model.experts.shared_gate`, but is 0. Set the width of "
        "the shared MLP, or remove `model.experts.shared_gate`."),
    ),
    "weights of nothing": ({"scaling": 0.0}, "`model.experts.scaling` must be above 0 and finite, but is 0.0."),
    "a negative loss": ({"balance_loss": -1.0}, "`model.experts.balance_loss` must be at least 0, but is -1.0."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_settings_are_refused(name: str) -> None:
    settings, message = REFUSALS[name]
    assert refusal(ConfigError, ExpertsConfig, **settings) == message


def test_tensor_ranks_divide_experts_in_their_width() -> None:
    require_tensor_axis(model_of(size=24, shared_size=8), 4)
    told = refusal(LayoutError, require_tensor_axis, model_of(size=24, shared_size=6), 4)
    assert told == "`layout.tensor` must divide `model.experts.shared_size` (6), but is 4. Try 1 or 2."
    told = refusal(LayoutError, require_tensor_axis, model_of(size=10), 4)
    assert told == "`layout.tensor` must divide `model.experts.size` (10), but is 4. Try 1 or 2."
