"""Settings of latent attention."""

import dataclasses
import json
import tomllib
from typing import Any

import pytest

from crosscut.config import ConfigError, Layout, LayoutError, ModelConfig, dump_toml, load_run
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.parts.latent_attention import LatentAttentionConfig
from tests.refusals import refusal

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 256, "positions": "rotary"}
SIZES: dict[str, Any] = {"key_value_rank": 16, "nope_size": 6, "rope_size": 4, "value_size": 5}


def model_of(layers: tuple[str, ...] = ("latent_attention gelu",), **others: Any) -> ModelConfig:
    sizes = {name: others.pop(name) for name in list(others) if name in LatentAttentionConfig.__annotations__}
    return ModelConfig(**SHAPE, layers=layers, latent_attention=LatentAttentionConfig(**{**SIZES, **sizes}), **others)


def test_scores_have_the_factor_of_yarn() -> None:
    sizes = model_of(mscale_all_dim=0.5).latent_attention
    assert sizes.score_factor(1.0) == pytest.approx(10**-0.5)
    assert sizes.score_factor(1.0, 0.2) == pytest.approx(0.2)
    assert sizes.score_factor(40.0) == pytest.approx((0.05 * 3.6888794541139363 + 1) ** 2 * 10**-0.5)


def test_the_rotated_size_is_that_of_the_kinds_in_the_layers() -> None:
    assert model_of().rotary_size == 4
    assert model_of(("attention",)).rotary_size == 12
    assert model_of(("latent_attention", "attention"), head_size=4).rotary_size == 4
    assert model_of(("latent_attention", "sliding_attention"), head_size=8, rotary_fraction=0.5).rotary_size == 4
    assert model_of(("latent_attention", "nope_attention"), head_size=7).rotary_size == 4
    assert model_of(("mamba2",), mamba2={"head_size": 8}).rotary_size == 0


def test_a_run_with_a_section_is_written_and_read_again() -> None:
    model = {**SHAPE, "layers": ["latent_attention"], "latent_attention": SIZES}
    run = load_run({"model": model}, ["model.latent_attention.query_rank=7"])
    assert (run.model.latent_attention.query_rank, run.model.latent_attention.rope_size) == (7, 4)
    assert load_run(tomllib.loads(dump_toml(run))) == run
    assert ModelConfig(**json.loads(json.dumps(dataclasses.asdict(run.model)))) == run.model  # as in a checkpoint


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an odd size": (
        {"rope_size": 5},
        (
            "`model.latent_attention.rope_size` must be even, but is 5. Rotary positions rotate pairs of elements. "
            "Choose an even head size."
        ),
    ),
    "two sizes": (
        {"layers": ("latent_attention", "attention")},
        (
            "`model.latent_attention.rope_size` must be `model.head_size` (12) in a model with both kinds of "
            "attention, but is 4. All layers share the rotations of one size. Change one of the two, or set "
            'model.positions="learned".'
        ),
    ),
    "two sizes, one a fraction": (
        {"layers": ("latent_attention", "attention"), "rotary_fraction": 0.5},
        (
            "`model.latent_attention.rope_size` must be the 6 elements that `model.rotary_fraction` leaves of "
            "`model.head_size` in a model with both kinds of attention, but is 4. All layers share the rotations of "
            'one size. Change one of the two, or set model.positions="learned".'
        ),
    ),
    "norms that no layer has": (
        {"qk_norm": True},
        (
            "`model.qk_norm` must be false for a model whose layers have no `attention`, but is true. Remove "
            "`model.qk_norm`."
        ),
    ),
    "no latent": ({"key_value_rank": 0}, "`model.latent_attention.key_value_rank` must be at least 1, but is 0."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    sizes, told = REFUSED[name]
    assert refusal(ConfigError, model_of, **sizes) == told


def test_ranks_divide_the_heads_of_the_model() -> None:
    require_tensor_axis(model_of(("latent_attention",)), 4)
    assert refusal(LayoutError, require_tensor_axis, model_of(), 8) == (
        "`layout.tensor` must divide `model.num_heads` (4), but is 8. Try 1, 2 or 4."
    )


def test_float8_needs_even_widths_of_latents_and_heads() -> None:
    model = {**SHAPE, "hidden_size": 64, "layers": ["latent_attention"], "latent_attention": SIZES}
    table = {"model": model, "training": {"precision": "float8"}}
    told = refusal(ConfigError, load_run, table, [], change_layout=lambda _: Layout())
    assert told.startswith("`model.latent_attention.rope_size` must be a multiple of 16 for float8 products, but is 4.")
