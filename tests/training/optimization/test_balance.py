"""Biases that follow the loads of experts, and the figures that a step reports."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout, RunConfig
from crosscut.model.stages import forward_loss
from crosscut.training.step import Trainer
from crosscut.verification.routing import Forced, force
from tests.ranks import RankPool
from tests.training.jobs import parts

RATE = 0.01
EXPERTS = [
    'model.layers=["attention swiglu","attention experts"]', "model.num_layers=4", "model.experts.number=4",
    "model.experts.size=32", "model.experts.balance_bias=true", f"model.experts.balance_rate={RATE}",
    "model.experts.router_z_loss=0.001", "training.precision=float64", "model.dropout=0.0",
]  # fmt: skip
PLACES = ("blocks.1.mlp.router.bias", "blocks.3.mlp.router.bias")


def biases(trainer: Trainer) -> list[Tensor]:
    named = dict(trainer.model.named_parameters())
    return [named[name].detach().full_tensor().clone() for name in PLACES if name in named]


def steps_of(run: RunConfig, forced: Forced, num_steps: int) -> Any:
    """Reported figures of each step, the loads after the last one, and the biases after each step."""
    trainer, batches = parts(run)
    force(trainer.model, forced)
    told, found = [], []
    for step in range(num_steps):
        told.append(trainer.step(step, batches.micro_batches(step)).wait().values())
        found.append(biases(trainer))
        forward_loss(trainer.model, batches.micro_batches(step)[0])  # an evaluation counts nothing
    return told, [load.tolist() for load in trainer.balance.loads], found


def test_biases_of_busy_experts_fall_and_those_of_idle_ones_rise(ranks: RankPool, run_with: Any) -> None:
    run = run_with(*EXPERTS)
    told, loads, found = ranks.run(1, steps_of, run, Forced.COLLAPSED, 2)[0]
    rows = run.training.batch_size * run.training.sequence_length
    assert loads == [[rows, rows, 0, 0]] * 2
    for step, of_layers in enumerate(found):
        for bias in of_layers:
            torch.testing.assert_close(bias, (step + 1) * RATE * torch.tensor([-1.0, -1, 1, 1]).double())
    assert told[0]["largest_load"] == 2.0
    assert told[0].keys() >= {"balance", "router_z", "router_entropy"}
    assert told[0]["balance"] == pytest.approx(1.0, abs=0.05)  # scores are still alike
    assert told[0]["router_entropy"] == pytest.approx(torch.tensor(4.0).log().item(), abs=0.01)


def test_a_model_without_experts_reports_nothing_of_them(ranks: RankPool, run_with: Any) -> None:
    told, loads, _ = ranks.run(1, steps_of, run_with(), Forced.AS_CHOSEN, 1)[0]
    assert loads == []
    assert not told[0].keys() & {"balance", "router_z", "largest_load", "router_entropy"}


LAYOUTS = {
    "data 2, micro-batches": (Layout(data=2), ["layout.data=2", "training.micro_batch_size=1"]),
    "ZeRO-3": (Layout(data=2), ["layout.data=2", "layout.sharding=zero3"]),
    "pipeline": (Layout(pipeline=2), ["layout.pipeline=2"]),
    "context, recomputed": (Layout(context=2), ["layout.context=2", "training.recompute=full"]),
    "tensor, split": (Layout(tensor=2), ["layout.tensor=2", "layout.sequence_parallel=true"]),
}


@pytest.mark.one_in(len(LAYOUTS))
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_follows_the_same_loads(ranks: RankPool, run_with: Any, name: str) -> None:
    layout, overrides = LAYOUTS[name]
    plain, loads, expected = ranks.run(1, steps_of, run_with(*EXPERTS), Forced.AS_CHOSEN, 4)[0]
    every = ranks.run(layout.world_size, steps_of, run_with(*EXPERTS, *overrides), Forced.AS_CHOSEN, 4)
    for told, of_rank, found in every:
        assert of_rank == loads
        for mine, other in zip(told, plain, strict=True):
            assert mine == pytest.approx(other, rel=1e-10)
        for mine_after, other_after in zip(found, expected, strict=True):
            assert all(any(torch.equal(mine, other) for other in other_after) for mine in mine_after)
            assert mine_after


def test_a_step_that_is_held_moves_no_bias(ranks: RankPool, run_with: Any) -> None:
    assert ranks.run(1, held_step, run_with(*EXPERTS))[0] == [0.0] * 8


def held_step(run: RunConfig) -> list[float]:
    trainer, batches = parts(run)
    force(trainer.model, Forced.COLLAPSED)
    loss = trainer.accumulate(0, batches.micro_batches(0))
    trainer.update(0, loss * torch.nan)
    return [float(value) for bias in biases(trainer) for value in bias]
