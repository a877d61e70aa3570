"""Initial weights (paper, section 4.1.1)."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout, ModelConfig
from crosscut.config.parts.gated_delta import GatedDeltaConfig
from crosscut.config.parts.mamba import MambaConfig
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.config.training import InitialSpread
from crosscut.model import initialize
from crosscut.parallel.state.parameters import local_part
from tests.model.twins import CONFIG, build, real
from tests.ranks import RankPool

WIDE = ModelConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=300, max_sequence_length=64, dropout=0.0)


def _weights(layout: Layout, config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = build(layout, config=config, dtype=dtype)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_matrices_are_normal_with_0_02_and_those_before_a_residual_scaled_down(ranks: RankPool) -> None:
    residual = 0
    for name, weight in ranks.run(1, _weights, Layout(), WIDE)[0].items():
        if weight.dim() == 2:
            before_residual = name.endswith(("attention.output.weight", "mlp.contract.weight"))
            residual += before_residual
            expected = 0.02 / 4 if before_residual else 0.02  # 1 / sqrt(2 x 8 layers) = 1 / 4
            values = real(name, weight)
            assert values.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(values.mean().item()) < 0.05 * expected, name
    assert residual == 2 * WIDE.num_layers


def test_biases_are_zero_and_norms_the_identity(ranks: RankPool) -> None:
    vectors = {n: w for n, w in ranks.run(1, _weights, Layout(), CONFIG)[0].items() if w.dim() == 1}
    assert len(vectors) == 9 * CONFIG.num_layers + 2
    for name, vector in vectors.items():
        expected = torch.ones_like(vector) if name.endswith("norm.weight") else torch.zeros_like(vector)
        assert torch.equal(vector, expected), name


OTHERWISE = {"spread": InitialSpread.FAN_IN, "zero_outputs": True}


def _weights_otherwise(layout: Layout, config: ModelConfig) -> dict[str, Tensor]:
    model = build(layout, config=config)
    for parameter in model.parameters():
        local_part(parameter.detach()).zero_()
    initialize(model, 3, **OTHERWISE)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_spread_by_fan_in_and_zero_outputs(ranks: RankPool) -> None:
    untied = dataclasses.replace(WIDE, tied=False)
    weights = ranks.run(1, _weights_otherwise, Layout(), untied)[0]
    deviations = {name: real(name, weight).std().item() for name, weight in weights.items() if weight.dim() == 2}
    zero = {name for name, deviation in deviations.items() if not deviation}
    assert zero == {f"blocks.{i}.{name}.weight" for i in range(8) for name in ("attention.output", "mlp.contract")}
    expected = {"tokens": 1.0, "positions": 1.0, "output": 1 / 8, "query": 1 / 8, "key_value": 1 / 8, "expand": 1 / 8}
    for name in set(deviations) - zero:
        assert deviations[name] == pytest.approx(expected[name.split(".")[-2]], rel=0.06), name


LAYOUTS = [
    Layout(tensor=4),
    Layout(tensor=2),
    Layout(tensor=2, data=2),
    Layout(data=2, sharding="zero2"),
    Layout(data=3, sharding="zero3"),
    Layout(tensor=2, data=2, sharding="zero3"),
    Layout(data=4, sharding="zero3", shard_group=2),
]


CASES = [
    *((_weights, layout) for layout in LAYOUTS),
    (_weights_otherwise, Layout(tensor=2, data=2, sharding="zero3")),
    (_weights_otherwise, Layout(tensor=4)),
]
QUICK = [CASES[0], CASES[6], CASES[7]]


@pytest.mark.parametrize(
    ("weights_of", "layout"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_no_layout_changes_them(ranks: RankPool, weights_of: Any, layout: Layout) -> None:
    expected = ranks.run(1, weights_of, Layout(), CONFIG)[0]
    for weights in ranks.run(layout.world_size, weights_of, layout, CONFIG):
        for name, weight in expected.items():
            assert torch.equal(real(name, weights[name]), real(name, weight)), name


@pytest.mark.parametrize("tensor", [1, 4])
def test_the_vocabulary_s_padding_is_zero(ranks: RankPool, tensor: int) -> None:
    for weights in ranks.run(tensor, _weights, Layout(tensor=tensor), CONFIG):
        padding = weights["tokens.weight"][CONFIG.vocab_size :]
        assert padding.numel() > 0
        assert torch.count_nonzero(padding) == 0


def test_every_type_holds_the_same_weights(ranks: RankPool) -> None:
    single = ranks.run(1, _weights, Layout(), CONFIG)[0]
    double = ranks.run(1, _weights, Layout(), CONFIG, torch.float64)[0]
    for name, weight in single.items():
        assert double[name].dtype == torch.float64
        assert torch.equal(double[name], weight.double())


def test_every_layer_has_weights_of_its_own(ranks: RankPool) -> None:
    weights = ranks.run(1, _weights, Layout(), CONFIG)[0]
    first, second = (weights[f"blocks.{i}.attention.qkv.query.weight"] for i in (0, 1))
    assert not torch.isclose(first, second).any(dim=1).all()
    assert (first - second).abs().min(dim=0).values.max() > 0


STATES = dataclasses.replace(WIDE, layers=("mamba2",), num_layers=1, mamba2=Mamba2Config(head_size=1, state_size=2))


def test_decay_rates_and_step_sizes_are_those_of_the_published_code(ranks: RankPool) -> None:
    weights = ranks.run(1, _weights, Layout(), STATES)[0]
    rates = weights["blocks.0.attention.log_rate"].exp()
    assert 1 <= rates.min() < 1.5 < 15.5 < rates.max() <= 16
    assert rates.mean().item() == pytest.approx(8.5, rel=0.1)
    sizes = torch.nn.functional.softplus(weights["blocks.0.attention.step_bias"])
    assert 0.001 <= sizes.min() < 0.0012 < 0.09 < sizes.max() <= 0.1
    assert sizes.log10().mean().item() == pytest.approx(-2, rel=0.1)
    assert weights["blocks.0.attention.skip"].eq(1).all()
    assert weights["blocks.0.attention.norm.weight"].eq(1).all()
    assert weights["blocks.0.attention.convolution.weight"].std().item() == pytest.approx(12**-0.5, rel=0.1)


def test_heads_of_gated_delta_nets_start_as_in_the_published_code(ranks: RankPool) -> None:
    sizes = GatedDeltaConfig(num_key_heads=64, num_value_heads=512, key_head_size=1, value_head_size=1)
    model = dataclasses.replace(WIDE, layers=("gated_delta",), num_layers=1, gated_delta=sizes)
    weights = ranks.run(1, _weights, Layout(), model)[0]
    rates = weights["blocks.0.attention.log_rate"].exp()
    assert 0.01 <= rates.min() < 0.5 < 15.5 < rates.max() <= 16
    sizes_of_steps = torch.nn.functional.softplus(weights["blocks.0.attention.step_bias"])
    assert 0.001 <= sizes_of_steps.min() < 0.0012 < 0.09 < sizes_of_steps.max() <= 0.1
    assert weights["blocks.0.attention.norm.weight"].eq(1).all()
    assert "blocks.0.attention.convolution.bias" not in weights


def test_offsets_of_norms_start_at_zero(ranks: RankPool) -> None:
    model = dataclasses.replace(WIDE, num_layers=1, norm="rms", qk_norm=True, norm_offset=True)
    weights = ranks.run(1, _weights, Layout(), model)[0]
    for name in ("blocks.0.attention_norm", "blocks.0.attention.query_norm", "final_norm"):
        assert weights[f"{name}.weight"].eq(0).all()


CHANNELS = dataclasses.replace(WIDE, layers=("mamba",), num_layers=1, mamba=MambaConfig(state_size=5, step_rank=12))


def test_the_elements_of_a_channel_decay_at_rates_from_one_on(ranks: RankPool) -> None:
    weights = ranks.run(1, _weights, Layout(), CHANNELS)[0]
    rates = weights["blocks.0.attention.log_rate"].exp()
    torch.testing.assert_close(rates, torch.arange(1.0, 6.0).expand_as(rates).to(rates.dtype))
    assert weights["blocks.0.attention.step.weight"].std().item() == pytest.approx(36**-0.5, rel=0.1)
