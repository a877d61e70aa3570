"""Twenty steps of a mixture of experts, which stop after ten and go on at another layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.config import RunConfig
from crosscut.training.loop import Loop
from tests.ranks import RankPool
from tests.training.jobs import parts

pytestmark = pytest.mark.slow  # long runs of what quick tests of experts check for a few steps

EXPERTS = (
    'model.layers=["attention swiglu","attention experts"]', "model.num_layers=4", "model.experts.number=4",
    "model.experts.size=32", "model.experts.shared_size=16", "model.experts.balance_bias=true",
    "model.experts.balance_loss=0.01", "model.experts.router_z_loss=0.001", "model.dropout=0.0",
    "training.precision=float64", "training.steps=20", "checkpoint.every=10", "checkpoint.keep=100",
)  # fmt: skip
LAYOUTS = {
    "one rank": (),
    "expert ranks": ("layout.data=2", "layout.expert=2"),
    "expert and tensor ranks": ("layout.data=2", "layout.expert=2", "layout.tensor=2", "layout.sequence_parallel=true"),
    "expert and context ranks": ("layout.context=2", "layout.expert=2"),
    "expert ranks over data and context": ("layout.data=2", "layout.context=2", "layout.expert=4"),
    "expert ranks and ZeRO-3": ("layout.data=4", "layout.expert=2", "layout.sharding=zero3"),
    "expert ranks in a pipeline": (
        "layout.data=2", "layout.expert=2", "layout.pipeline=2", "training.micro_batch_size=1"
    ),
}  # fmt: skip


def train(run: RunConfig, resume_from: Path | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps that this call makes, and the whole weights at the end."""
    trainer, batches = parts(run)
    losses, step = [], trainer.step

    def noted(number: int, micro_batches: Any) -> Any:
        result = step(number, micro_batches)
        losses.append(result.loss)
        return result

    trainer.step = noted
    loop = Loop(trainer, batches)
    with loop.checkpoints.completed():
        loop.train(resume_from)
    weights = {name: each.detach().full_tensor().clone() for name, each in trainer.model.named_parameters()}
    return losses, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixture_goes_on_at_another_layout_as_if_it_had_never_stopped(
    ranks: RankPool, run_with: Callable[..., RunConfig], layout: str, tmp_path: Path
) -> None:
    """The first ten steps are those of `layout`, and the last ten those of every other one in turn."""
    expected, weights = ranks.run(1, train, run_with(*EXPERTS), time_limit=240)[0]
    first = run_with(*EXPERTS, *LAYOUTS[layout], f"output.folder={tmp_path / 'first'}")
    losses, _ = ranks.run(first.layout.world_size, train, first, time_limit=240)[0]
    assert losses == pytest.approx(expected, rel=1e-10)
    names = list(LAYOUTS)
    for shift in (1, 3):
        other = run_with(*EXPERTS, *LAYOUTS[names[(names.index(layout) + shift) % len(names)]])
        saved = Path(first.checkpoints_folder) / "step-00000010"
        losses, found = ranks.run(other.layout.world_size, train, other, saved, time_limit=240)[0]
        assert losses == pytest.approx(expected[10:], rel=1e-10)
        for name, weight in found.items():
            torch.testing.assert_close(weight[: len(weights[name])], weights[name], rtol=1e-6, atol=1e-9)


def with_two_threads(run: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(2)
    try:
        return train(run)
    finally:
        torch.set_num_threads(1)


def test_two_threads_repeat_a_run_to_the_last_bit(ranks: RankPool, run_with: Callable[..., RunConfig]) -> None:
    run = run_with(*EXPERTS, "training.precision=float32", "model.hidden_size=128", "training.batch_size=16")
    losses, weights = ranks.run(1, with_two_threads, run)[0]
    again, found = ranks.run(1, with_two_threads, run)[0]
    assert json.dumps(losses) == json.dumps(again)
    assert all(torch.equal(weight, found[name]) for name, weight in weights.items())
