"""Each family of decoders against one written apart from it, and what its pieces promise."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import PRESETS, ConfigError, Layout, LayoutError, ModelConfig
from crosscut.config.parts.gated_delta import GatedDeltaConfig
from crosscut.config.parts.mamba import MambaConfig
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.model import GPT, Batch
from crosscut.parallel import GradientReducer, RandomStreams, gather_from_sequence_parallel, make_mesh
from crosscut.parallel.state.sharding import reshard
from tests.model.twins import (
    CONFIG,
    CPU,
    FAMILIES,
    LAYOUTS,
    B,
    S,
    assert_gradients_of,
    batch,
    batch_for,
    build,
    plain_twin,
    randomised,
    wholes_of,
)
from tests.ranks import RankPool

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def _run(layout: Layout, config: ModelConfig) -> dict[str, Any]:
    """Hidden states, loss, gradients and next-token scores on one rank; the first data rank has the whole batch."""
    model = randomised(layout, config=config)
    batch = batch_for(config)
    hidden = model(batch)
    if model.mesh.sequence_parallel:
        hidden = gather_from_sequence_parallel(hidden, model.mesh.tensor)
    reducer = GradientReducer(model.parameters(), model.mesh)
    reducer.arm()
    loss = model.loss(batch, {"tokens": 0.5, **({"order": 0.25} if config.sentence_order else {})})
    loss.backward()
    reducer.finish()
    return {
        "hidden": hidden.detach(),
        "loss": loss.detach(),
        "logits": model.logits_of(model.hidden_states(short(batch))[:, -1]).detach(),
        **wholes_of(model),
    }


def short(batch: Batch) -> Batch:
    """The same sequences without their last tokens: a length that no split divides."""
    names = ("tokens", "segments", "mask")
    return Batch(**{name: tensor[:, :-1] for name, tensor in batch.given().items() if name in names})


@pytest.mark.one_in(11)
@pytest.mark.parametrize("layout", [Layout(), *[layout for layout in LAYOUTS if layout.data == 1]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_plain_model(ranks: RankPool, family: str, layout: Layout) -> None:
    config = FAMILIES[family]
    results = ranks.run(layout.world_size, _run, layout, config)
    plain = plain_twin(config, results[0]["parameters"])
    batch = batch_for(config)
    loss = plain.loss(batch) * batch.num_targets * 0.5
    if config.sentence_order:
        loss = loss + plain.order_loss(batch) * 0.25
    loss.backward()
    for result in results:
        torch.testing.assert_close(result["hidden"], plain(batch).detach(), **CLOSE)
        torch.testing.assert_close(result["loss"], loss.detach(), **CLOSE)
        logits = plain.logits(short(batch))[:, -1].detach()
        torch.testing.assert_close(result["logits"], logits, **CLOSE)
        assert_gradients_of(plain, result["gradients"], tolerance=1e-11)


def _change_last(layout: Layout) -> tuple[Tensor, Tensor]:
    model = randomised(layout)
    own = batch(0)
    before = model(own).detach()
    own.tokens[:, -1] = (own.tokens[:, -1] + 1) % CONFIG.vocab_size
    return before, model(own).detach()


def test_no_position_sees_a_later_one(ranks: RankPool) -> None:
    before, after = ranks.run(2, _change_last, Layout(tensor=2))[0]
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def _losses(compute_dtype: torch.dtype, layout: Layout) -> tuple[float, dict[str, Tensor], torch.dtype]:
    model = build(layout, dtype=torch.float32, compute_dtype=compute_dtype)
    loss = model.loss(batch(0), {"tokens": 1 / (B * S)})
    loss.backward()
    hidden = model(batch(0))
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}, hidden.dtype


def test_bfloat16_products_stay_close_to_float32_and_keep_its_gradients(ranks: RankPool) -> None:
    layout = Layout(tensor=2)
    loss, gradients, _ = ranks.run(2, _losses, torch.float32, layout)[0]
    rough_loss, rough_gradients, dtype = ranks.run(2, _losses, torch.bfloat16, layout)[0]
    assert dtype == torch.bfloat16
    assert rough_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in gradients.items():
        assert rough_gradients[name].dtype == torch.float32
        if not name.endswith("key_value.bias"):  # half of it, the keys', is zero but for rounding
            assert (rough_gradients[name] - gradient).norm() < 0.05 * gradient.norm(), name


STATES = dataclasses.replace(
    CONFIG,
    layers=("mamba", "mamba2 gelu", "gated_delta attention"),
    num_layers=3,
    mamba=MambaConfig(state_size=5, chunk_size=6),
    mamba2=Mamba2Config(head_size=8, state_size=6, chunk_size=5),
    gated_delta=GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_head_size=6, value_head_size=8, chunk_size=8),
)


def _in_bfloat16(layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    model = build(layout, config=STATES, dtype=torch.float32, compute_dtype=torch.bfloat16)
    loss = model.loss(batch(0), {"tokens": 1 / (B * S)})
    loss.backward()
    hidden = model(batch(0)).detach()
    reshard(model)
    return hidden, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("sharding", ["zero3", "zero2"])
def test_ranks_that_share_a_copy_compute_with_its_float32_decay_rates(ranks: RankPool, sharding: str) -> None:
    hidden, gradients = ranks.run(1, _in_bfloat16, Layout())[0]
    shared, sums = ranks.run(2, _in_bfloat16, Layout(data=2, sharding=sharding))[0]
    assert torch.equal(shared, hidden)
    for name, gradient in gradients.items():  # the data ranks read the same batch
        assert torch.equal(sums[name], 2 * gradient), name


def _sequence_of(length: int, layout: Layout) -> None:
    build(layout)(Batch(tokens=torch.zeros(1, length, dtype=torch.long)))


def test_a_sequence_that_the_split_does_not_divide_is_refused(ranks: RankPool) -> None:
    with pytest.raises(LayoutError, match=r"^To split a tensor over the tensor axis, the size of dimension 1 must be"):
        ranks.run(2, _sequence_of, 7, Layout(tensor=2, sequence_parallel=True))


def test_a_sequence_longer_than_the_positions_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="at most 16 tokens, one for each position of the model, but has 17"):
        ranks.run(1, _sequence_of, 17, Layout())


def _num_parameters(config: ModelConfig) -> int:
    mesh = make_mesh(Layout(), CPU)
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, seed=1))  # its weights are not drawn
    padding = model.tokens.weight.shape[0] - config.vocab_size
    return sum(p.numel() for p in model.parameters()) - padding * config.hidden_size


def test_gpt2_small_has_its_124_million_parameters(ranks: RankPool) -> None:
    shape = PRESETS["gpt2-small"]
    one, two = (ranks.run(1, _num_parameters, ModelConfig(**{**shape, "num_layers": n}))[0] for n in (1, 2))
    assert one + 11 * (two - one) == 124_439_808
