"""The account of activation memory: the published closed forms, and what ours says beside them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.config import ConfigError, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.planner import activations_held, layer_activations, published_layer_activations


def make_run(
    *, tensor: int = 1, split: bool = False, dropout: float = 0.1, precision: str = "bfloat16", **training: object
) -> RunConfig:
    model = ModelConfig(num_layers=5, hidden_size=1024, num_heads=16, vocab_size=500, dropout=dropout)
    options = {"batch_size": 2, "sequence_length": 512, "precision": precision, **training}
    return RunConfig(
        model=model, layout=Layout(tensor=tensor, sequence_parallel=split), training=TrainingConfig(**options)
    )


s, b, h, a = 512, 2, 1024, 16


@given(t=st.sampled_from([1, 2, 4, 8]))
def test_published_formulas_are_those_of_the_table(t: int) -> None:
    def published(split: bool, recompute: str) -> float:
        return published_layer_activations(make_run(tensor=t, split=split, recompute=recompute))

    assert published(False, "none") == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert published(True, "none") == pytest.approx(s * b * h * (34 / t + 5 * a * s / (h * t)))
    assert published(False, "selective") == pytest.approx(s * b * h * (10 + 24 / t))
    assert published(True, "selective") == pytest.approx(s * b * h * 34 / t)
    assert published(False, "full") == pytest.approx(2 * s * b * h)
    assert published(True, "full") == pytest.approx(2 * s * b * h / t)


def test_published_formulas_are_those_of_a_layer_with_attention() -> None:
    run = make_run()
    hybrid = replace(run, model=replace(run.model, layers=("mamba2 gelu", "attention gelu")))
    assert published_layer_activations(hybrid) == published_layer_activations(run)
    with pytest.raises(ConfigError, match="but is 5 layers of mamba2 and gelu"):
        published_layer_activations(replace(run, model=replace(run.model, layers=("mamba2 gelu",))))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_with_dropout_in_two_bytes_ours_is_the_published_form_of_a_recomputed_core(tensor: int, split: bool) -> None:
    run = make_run(tensor=tensor, split=split, recompute="selective")
    assert layer_activations(run).total == pytest.approx(published_layer_activations(run), rel=0.01)


def test_without_dropout_there_are_no_masks() -> None:
    with_masks, without = (layer_activations(make_run(dropout=p)) for p in (0.1, 0.0))
    assert with_masks.masks == 2 * s * b * h
    assert replace(with_masks, masks=0) == without


def test_float32_takes_twice_the_bytes_of_bfloat16_and_keeps_no_second_weights() -> None:
    wide, narrow = (layer_activations(make_run(precision=p)) for p in ("float32", "bfloat16"))
    assert wide.inside == 2 * narrow.inside
    assert narrow.weights == 2 * (12 * h * h + 4 * h)
    assert wide.weights == 0


def test_a_recomputed_layer_keeps_its_input_or_nothing() -> None:
    run = make_run(recompute="full")
    assert layer_activations(run).total == 2 * s * b * h
    offloading = make_run(recompute="full", offload=("activations",))
    assert layer_activations(offloading).total == activations_held(offloading) == 0


def test_layers_in_between_keep_all() -> None:
    plain = layer_activations(make_run())
    held = activations_held(make_run(recompute="full", recompute_every=2))
    assert held == 3 * 2 * s * b * h + 2 * (plain.total + plain.weights)


@pytest.mark.parametrize(
    ("precision", "capability", "heads"),
    [("float32", (9, 0), 16), ("float16", (7, 0), 16), ("float16", (8, 0), 4), ("bfloat16", (9, 0), 4)],
)
def test_keys_and_values_are_counted_for_each_head_of_queries_where_the_kernel_asks_for_them(
    precision: str, capability: tuple[int, int], heads: int
) -> None:
    run = make_run(precision=precision, dropout=0.0)
    run = replace(run, model=replace(run.model, num_kv_heads=4))
    tokens, of_mlp = s * b * run.training.numbers.compute_bytes, 8 * h  # before and after the activation
    assert layer_activations(run, capability=capability).inside == tokens * (2 * h + 2 * h * heads // a + of_mlp)
    assert layer_activations(run, device="cpu").inside == tokens * (2 * h + 2 * h * 4 // a + of_mlp)


@pytest.mark.parametrize(("compiled", "heads"), [("auto", 16), ("off", 4)])
def test_repeated_keys_that_attention_makes_again_are_kept_by_compiled_layers_alone(compiled: str, heads: int) -> None:
    run = make_run(precision="float32", dropout=0.0, recompute="selective", compile=compiled)
    run = replace(run, model=replace(run.model, num_kv_heads=4))
    of_mlp = 8 * h  # before and after the activation
    assert layer_activations(run).inside == s * b * 4 * (2 * h + 2 * h * heads // a + of_mlp)
