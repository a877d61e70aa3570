import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.architecture import describe
from crosscut.architecture.messages import products_at
from crosscut.config import PRESETS, ConfigError, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.planner import (
    flops_per_step,
    forward_flops_per_token,
    hardware_flops_per_rank,
    model_flops_per_token,
    recomputed_flops_per_step,
)
from crosscut.planner.candidate import target_of
from tests.refusals import refusal

GPT2 = ModelConfig(**PRESETS["gpt2-small"])


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.integers(1, 32))
    return ModelConfig(
        num_layers=draw(st.integers(1, 48)),
        hidden_size=heads * draw(st.integers(1, 128)),
        num_heads=heads,
        vocab_size=draw(st.integers(1, 100_000)),
    )


@settings(max_examples=20)
@given(model=models(), S=st.integers(1, 8192))
def test_flops_are_the_published_closed_forms_and_backward_takes_twice_the_forward_pass(
    model: ModelConfig, S: int
) -> None:
    L, H, V = model.num_layers, model.hidden_size, model.vocab_size
    for recompute, passes in ((True, 4), (False, 3)):
        published = 24 * passes * L * H**2 * (1 + S / (6 * H) + V / (4 * passes * L * H))
        assert model_flops_per_token(model, S, recompute=recompute) == pytest.approx(published, rel=1e-12)
    assert model_flops_per_token(model, S) == 3 * forward_flops_per_token(model, S)


def test_forward_counts_every_matrix_product() -> None:
    model = ModelConfig(num_layers=2, hidden_size=6, num_heads=2, vocab_size=11)
    S, H, head = 5, 6, 3
    products = [
        *2 * [(S, H, 3 * H), (S, H, H), (S, H, 4 * H), (S, 4 * H, H)],
        *2 * 2 * [(S, head, S), (S, S, head)],
        (S, H, 11),
    ]
    assert S * forward_flops_per_token(model, S) == sum(2 * m * k * n for m, k, n in products)


def test_a_step_computes_every_token_of_the_batch() -> None:
    run = RunConfig(model=GPT2, training=TrainingConfig(batch_size=8, sequence_length=256))
    assert flops_per_step(run) == 8 * 256 * model_flops_per_token(GPT2, 256)
    assert flops_per_step(run, recompute=True) == 8 * 256 * model_flops_per_token(GPT2, 256, recompute=True)


def recomputed(mode: str, *, every: int = 1, compiled: bool = False) -> int:
    """Repeated FLOPs of a step of one sequence of S = 5 tokens, H = 6, three layers."""
    model = ModelConfig(num_layers=3, hidden_size=6, num_heads=2, vocab_size=11)
    training = TrainingConfig(batch_size=1, sequence_length=5, recompute=mode, recompute_every=every)
    return recomputed_flops_per_step(RunConfig(model=model, training=training), compiled=compiled)


def test_recomputation_repeats_the_products_whose_results_are_needed() -> None:
    S, H = 5, 6
    attention = [(S, H // 2, S), (S, S, H // 2)] * 2
    matrices = [(S, H, 3 * H), (S, H, H), (S, H, 4 * H)]
    last = (S, 4 * H, H)

    def flops(products: list[tuple[int, int, int]]) -> int:
        return sum(2 * m * k * n for m, k, n in products)

    assert recomputed("none") == recomputed("operators") == 0
    assert recomputed("selective") == 3 * flops(attention)
    assert recomputed("full") == 3 * flops(attention + matrices)
    assert recomputed("full", compiled=True) == 3 * flops([*attention, *matrices, last])
    assert recomputed("full", every=2) == 2 * flops(attention + matrices)


def test_a_compiled_run_that_recomputes_all_is_the_published_one() -> None:
    run = RunConfig(model=GPT2, training=TrainingConfig(batch_size=8, sequence_length=256, recompute="full"))
    assert flops_per_step(run) + recomputed_flops_per_step(run, compiled=True) == flops_per_step(run, recompute=True)


def test_padding_of_the_vocabulary_is_not_counted() -> None:
    one_more = ModelConfig(**{**PRESETS["gpt2-small"], "vocab_size": 50_258})
    assert forward_flops_per_token(one_more, 1024) - forward_flops_per_token(GPT2, 1024) == 2 * GPT2.hidden_size


def test_a_sequence_has_at_least_one_token() -> None:
    assert refusal(ConfigError, forward_flops_per_token, GPT2, 0) == "`sequence_length` must be at least 1, but is 0."


def test_unknown_vocabulary_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"`model\.vocab_size` must be at least 1 for a forecast"):
        model_flops_per_token(ModelConfig(**PRESETS["laptop-tiny"]), 128)


@pytest.mark.parametrize("tensor", [1, 8, 32])
@pytest.mark.parametrize(("recompute", "every"), [("none", 1), ("full", 2)])
def test_a_rank_computes_its_part_and_keys_and_values_that_others_have_too(
    tensor: int, recompute: str, every: int
) -> None:
    """The products of a rank, shape by shape; 8 heads of keys and values."""
    model = ModelConfig(**{**PRESETS["llama3-8b"], "vocab_size": 128 * 1024})  # no padding
    training = TrainingConfig(batch_size=4, sequence_length=512, recompute=recompute, recompute_every=every)
    run = RunConfig(model=model, layout=Layout(tensor=tensor, data=2), training=training)
    decoder, target = describe(model), target_of(run, device="cpu")
    products = products_at(decoder.layers[0], target)
    scores_and_values = 2 * 2 * 2 * 512**2 * model.query_size // tensor
    layer = sum(product.flops for found in products.values() for product in found) + scores_and_values
    again = layer - products["mlp output"][0].flops if recompute == "full" else 0
    expected = model.num_layers * (3 * layer + again / 2) + 3 * decoder.loss.product(target).flops
    assert hardware_flops_per_rank(run) == expected
